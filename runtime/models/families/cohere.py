"""Command R, Command R+ and Aya 23: Command R7B with rotary embedding and full attention in all layers."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families.cohere2 import layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import NormSpec
from mycli.runtime.utils.json_fields import Fields


def normed_layer(config: ModelConfig, index: int) -> LayerSpec:
    """Return a layer of Command R+: each head of q and k has a LayerNorm of its own."""
    base, prefix = layer(config, index), f"model.layers.{index}.self_attn"
    norm = NormSpec(None, config.head_dim, config.rms_norm_eps, layer_norm=True, stacked=True)
    q_norm = replace(norm, name=f"{prefix}.q_norm", heads=config.heads)
    k_norm = replace(norm, name=f"{prefix}.k_norm", heads=config.kv_heads)
    return replace(base, mixer=replace(base.attention, q_norm=q_norm, k_norm=k_norm))


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_epsilon(raw, "layer_norm_eps")
    raw = hf_config.with_defaults(raw, tie_word_embeddings=True, logit_scale=0.0625, rope_theta=500000.0)
    fields = hf_config.common(raw, handled=("logit_scale",))
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        interleaved=True,
        layer_norm=True,
        logit_scale=raw.number("logit_scale", low=1e-9),
        build_layer=normed_layer if raw.boolean("use_qk_norm", False) else layer,
    )
