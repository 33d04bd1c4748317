"""MiniCPM3: latent attention; embeddings, residuals and logits are scaled."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.latent_layers import read_latent, with_latent_head
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    hidden, heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    layers = raw.integer("num_hidden_layers")
    raw = hf_config.with_defaults(
        raw,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        q_lora_rank=768,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        scale_depth=1.4,
        dim_model_base=256,
    )
    raw = with_latent_head(raw)
    if not raw.has("v_head_dim"):
        raw = Fields({**raw.values, "v_head_dim": hidden // heads}, raw.source)
    fields = hf_config.common(raw, handled=("longrope",))
    return ModelConfig(
        **fields,
        mlp_bias=raw.boolean("mlp_bias", False),
        embedding_scale=raw.number("scale_emb", 12.0, high=1e6),
        round_embedding_scale=True,
        residual_scale=raw.number("scale_depth", layers**0.5, high=1e6) / layers**0.5,
        logit_scale=raw.integer("dim_model_base", hidden) / hidden,
        build_layer=read_latent(raw),
    )
