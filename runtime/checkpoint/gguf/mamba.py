"""The tensors and keys of Mamba-2, for all architectures that have it, in both directions. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Config
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import TensorRule, ValueChange
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.recurrent_spec import MambaSpec

DECAY = ValueChange(store=lambda decay: -decay.exp(), load=lambda stored: (-stored).log())


def mamba(config: ModelConfig) -> MambaSpec:
    """Return the first state space mixer; all others have the same shape."""
    return next(spec.recurrent for spec in config.layer_specs if isinstance(spec.recurrent, MambaSpec))


# llama.cpp adds it without looking whether there is one.
CONVOLUTION_BIAS = Requirement("a bias of the convolution", lambda config: mamba(config).convolution.bias)
EXPANSION_OF_TWO = Requirement("mamba_expand = 2", lambda config: mamba(config).inner == 2 * config.hidden_size)


def _by_head(config: ModelConfig) -> tuple[int, ...]:
    return mamba(config).heads, 1


def _by_group(config: ModelConfig) -> tuple[int, ...]:
    spec = mamba(config)
    return spec.groups, spec.inner // spec.groups


def mamba_tensors(block: str) -> Mapping[str, TensorRule]:
    """Return the rules of the mixer `block` by GGUF name."""
    return {
        "ssm_in": TensorRule(f"{block}.in_proj"),
        "ssm_conv1d": TensorRule(f"{block}.conv1d"),
        "ssm_dt": TensorRule(f"{block}.dt_bias", suffixes={".bias": ""}),
        "ssm_a": TensorRule(f"{block}.A_log", change=DECAY, stored_shape=_by_head, suffixes={"": ""}),
        "ssm_d": TensorRule(f"{block}.D", stored_shape=_by_head, suffixes={"": ""}),
        "ssm_norm": TensorRule(f"{block}.norm", stored_shape=_by_group),
        "ssm_out": TensorRule(f"{block}.out_proj"),
    }


def has_bias(model: GgufModel, tensor: str) -> bool:
    """Return whether a tensor of any layer has a bias: GGUF has no key."""
    return any(name.endswith(f".{tensor}.bias") for name in model.tensors)


def read_mamba_keys(model: GgufModel, fields: Mapping[str, str], head_dim: str) -> Config:
    """Return the config fields of the sizes; `fields` by key, `head_dim` the one of the size of a head."""
    sizes = {field: model.integer(f"ssm.{key}", low=1) for key, field in fields.items()}
    heads, inner = model.integer("ssm.time_step_rank", low=1), model.integer("ssm.inner_size", low=1)
    if inner % heads:
        raise model.metadata.fail(model.key("ssm.inner_size"), f"= {inner} is not a multiple of {heads} heads")
    return {**sizes, head_dim: inner // heads}


def read_hybrid_fields(model: GgufModel) -> Config:
    """Return the config fields of models with attention that Bamba, Granite 4 H and Falcon-H1 share."""
    fields = {
        "conv_kernel": "mamba_d_conv",
        "state_size": "mamba_d_state",
        "group_count": "mamba_n_groups",
        "time_step_rank": "mamba_n_heads",
    }
    return {
        **read_mamba_keys(model, fields, "mamba_d_head"),
        "mamba_expand": expansion(model),
        "mamba_conv_bias": has_bias(model, "ssm_conv1d"),
        "mamba_proj_bias": has_bias(model, "ssm_in"),
        "attention_bias": has_bias(model, "attn_q"),
    }


def expansion(model: GgufModel) -> int:
    """Return how many times wider the mixer is than the residual stream, rounded down."""
    return max(1, model.integer("ssm.inner_size", low=1) // model.integer("embedding_length", low=1))


def write_mamba_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the header's keys for the sizes of Mamba-2."""
    spec = mamba(config)
    return {
        "ssm.conv_kernel": spec.convolution.taps,
        "ssm.state_size": spec.state_dim,
        "ssm.group_count": spec.groups,
        "ssm.time_step_rank": spec.heads,
        "ssm.inner_size": spec.inner,
    }


def write_granitehybrid_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of the sizes, of the layers with attention, and of its rotation."""
    heads = [0 if spec.recurrent else config.kv_heads for spec in config.layer_specs]
    rotates = bool(config.distinct_ropes)
    return {**write_mamba_keys(config), "attention.head_count_kv": heads, "rope.scaling.finetuned": rotates}
