"""Llama 1 to 3.3 and others with the same `model_type`: SmolLM, SmolLM2, TinyLlama, Yi."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    return ModelConfig(
        **hf_config.common(raw),
        **hf_config.attention_biases(raw),
        mlp_bias=raw.boolean("mlp_bias", False),
    )
