"""Helium 1: Llama with interleaved rotary embedding."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, head_dim=128, rms_norm_eps=1e-8, rope_theta=100000.0)
    return ModelConfig(
        **hf_config.common(raw),
        qkv_bias=raw.boolean("attention_bias", False),
        mlp_bias=raw.boolean("mlp_bias", False),
        interleaved=True,
    )
