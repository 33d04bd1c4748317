"""Arcee AFM: Llama with a squared-ReLU MLP without a gate."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5)
    return ModelConfig(
        **hf_config.common(raw, activations={"relu2": "relu2"}),
        **hf_config.attention_biases(raw),
        mlp_bias=raw.boolean("mlp_bias", False),
        mlp_gate=False,
    )
