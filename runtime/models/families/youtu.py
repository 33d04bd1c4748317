"""Youtu-LLM: latent attention and Llama's MLP."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.latent_layers import read_latent, with_latent_head
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    hf_config.require(raw, mlp_bias=False)
    raw = with_latent_head(raw)
    return ModelConfig(
        **hf_config.common(raw),
        interleaved=raw.boolean("rope_interleave", True),
        build_layer=read_latent(raw),
    )
