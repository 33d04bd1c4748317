"""Seed-OSS: Llama with biases on q, k and v, and a head_dim of its own."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, head_dim=128, num_key_value_heads=8)
    return ModelConfig(
        **hf_config.common(raw),
        qkv_bias=raw.boolean("attention_bias", True),
        output_bias=raw.boolean("attention_out_bias", False),
        mlp_bias=raw.boolean("mlp_bias", False),
    )
