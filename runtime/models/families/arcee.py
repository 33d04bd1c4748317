"""Arcee AFM: Llama whose MLP has no gate and a squared ReLU."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of an Arcee config.json."""
    bias = raw.boolean("attention_bias", False)
    return ModelConfig(
        **hf_config.common(raw, activations={"relu2": "relu2"}),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=raw.boolean("mlp_bias", False),
    )
