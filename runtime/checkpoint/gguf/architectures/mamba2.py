"""Mamba-2: a state space mixer in every layer, without attention and MLPs."""

from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.mamba import (
    CONVOLUTION_BIAS,
    expansion,
    has_bias,
    mamba_tensors,
    read_mamba_keys,
    write_mamba_keys,
)
from mycli.runtime.checkpoint.gguf.tensor_rules import MODEL_TENSORS, TensorRule
from mycli.runtime.models.config import ModelConfig

_FIELDS = {
    "conv_kernel": "conv_kernel",
    "state_size": "state_size",
    "group_count": "n_groups",
    "time_step_rank": "num_heads",
}


def _read_config(model: GgufModel, config: Config) -> Config:
    return {
        **read_mamba_keys(model, _FIELDS, "head_dim"),
        "expand": expansion(model),
        "use_conv_bias": has_bias(model, "ssm_conv1d"),
        "use_bias": has_bias(model, "ssm_in"),
    }


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    # Zero, as llama.cpp's converter writes them: there are no heads and no MLP.
    unused = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    return {**write_mamba_keys(config), **dict.fromkeys(unused, 0)}


ARCHITECTURE = Architecture(
    name="mamba2",
    model_type="mamba2",
    written_types=("mamba2",),
    requires=(CONVOLUTION_BIAS,),
    biases=("ssm_conv1d",),
    layer_tensors={"attn_norm": TensorRule("norm"), **mamba_tensors("mixer")},
    model_tensors={**MODEL_TENSORS, "output_norm": TensorRule("model.norm_f")},
    optional=("attention.head_count", "attention.head_count_kv", "feed_forward_length"),
    epsilon_field="layer_norm_epsilon",
    read_config=_read_config,
    write_keys=_write_keys,
)
