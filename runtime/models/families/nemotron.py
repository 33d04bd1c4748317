"""Nemotron 3 and 4 and Minitron: LayerNorms of gain 1 + w, partial rotation, a squared-ReLU MLP without a gate."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.hf_rope import rotary_dim
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_epsilon(raw, "norm_eps")
    fields = hf_config.common(raw, handled=("partial_rotary_factor",), activations=hf_config.UNGATED_RELU)
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        mlp_bias=raw.boolean("mlp_bias", False),
        mlp_gate=False,
        rotary_dim=rotary_dim(raw, fields["head_dim"], 0.5),
        norm_offset=1.0,
        layer_norm=True,
        norm_bias=True,
    )
