"""Jais 2: Llama with LayerNorms, biases everywhere, and a squared-ReLU MLP without a gate."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_epsilon(raw, "layer_norm_eps")
    return ModelConfig(
        **hf_config.common(raw, activations=hf_config.UNGATED_RELU),
        **hf_config.attention_biases(raw, default=True),
        mlp_bias=raw.boolean("mlp_bias", True),
        mlp_gate=False,
        layer_norm=True,
        norm_bias=True,
    )
