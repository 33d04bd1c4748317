"""OLMo 1: Llama with LayerNorms without gain and bias, and optional clipping of queries, keys and values."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = Fields({**raw.values, "rms_norm_eps": 1e-5}, raw.source)  # fixed in this family
    return ModelConfig(
        **hf_config.common(raw),
        **hf_config.attention_biases(raw),
        layer_norm=True,
        norm_gain=False,
        attention_clip=raw.number("clip_qkv", low=0.0) if raw.has("clip_qkv") else None,
        final_norm=None,
    )
