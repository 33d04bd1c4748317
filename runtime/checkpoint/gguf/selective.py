"""The tensors and keys of Mamba-1, for all architectures that have it, in both directions. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Config
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.mamba import DECAY, has_bias
from mycli.runtime.checkpoint.gguf.requirements import Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import TensorRule
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.recurrent_spec import SelectiveSpec


def selective(config: ModelConfig) -> SelectiveSpec:
    """Return the first mixer; all others have the same shape."""
    return next(spec.recurrent for spec in config.layer_specs if isinstance(spec.recurrent, SelectiveSpec))


SELECTIVE_BIASES = ("ssm_conv1d", "ssm_dt")
SELECTIVE_REQUIRES = (
    Requirement("a bias of the convolution", lambda config: selective(config).convolution.bias),
    Requirement(
        "mixers twice as wide as hidden_size", lambda config: selective(config).channels == 2 * config.hidden_size
    ),
)


def selective_tensors(block: str) -> Mapping[str, TensorRule]:
    """Return the rules of the mixer `block` by GGUF name."""
    return {
        "ssm_in": TensorRule(f"{block}.in_proj"),
        "ssm_conv1d": TensorRule(f"{block}.conv1d"),
        "ssm_x": TensorRule(f"{block}.x_proj"),
        "ssm_dt": TensorRule(f"{block}.dt_proj"),
        "ssm_a": TensorRule(f"{block}.A_log", change=DECAY, suffixes={"": ""}),
        "ssm_d": TensorRule(f"{block}.D", suffixes={"": ""}),
        "ssm_out": TensorRule(f"{block}.out_proj"),
    }


def read_selective_fields(model: GgufModel, config: Config) -> Config:
    """Return the config fields of Mamba and Falcon-Mamba."""
    return {
        "conv_kernel": model.integer("ssm.conv_kernel", low=1),
        "state_size": model.integer("ssm.state_size", low=1),
        "time_step_rank": model.integer("ssm.time_step_rank", low=1),
        "intermediate_size": model.integer("ssm.inner_size", low=1),
        "use_conv_bias": has_bias(model, "ssm_conv1d"),
        "use_bias": has_bias(model, "ssm_in"),
    }


def write_selective_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the header's keys for the sizes of Mamba-1."""
    spec = selective(config)
    return {
        "ssm.conv_kernel": spec.convolution.taps,
        "ssm.state_size": spec.state_dim,
        "ssm.time_step_rank": spec.step.in_features,
        "ssm.inner_size": spec.channels,
    }


def write_mamba1_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of Mamba and Falcon-Mamba."""
    # Zero, as llama.cpp's converter writes them: there are no heads and no MLP.
    unused = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    norms = {"ssm.dt_b_c_rms": bool(selective(config).select_norms)}
    return {**write_selective_keys(config), **dict.fromkeys(unused, 0), **norms}
