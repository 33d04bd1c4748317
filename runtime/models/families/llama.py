"""Llama 1 to 3.3 and its kin under the same `model_type`: SmolLM, SmolLM2, TinyLlama, Yi and others."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a Llama config.json."""
    bias = raw.boolean("attention_bias", False)
    return ModelConfig(
        **hf_config.common(raw),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=raw.boolean("mlp_bias", False),
    )
