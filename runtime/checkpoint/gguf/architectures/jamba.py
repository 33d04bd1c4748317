"""Jamba: Mamba-1 in most layers, attention without rotation in the others, experts in some."""

from collections.abc import Sequence
from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.experts import expert_tensors, experts_spec, layer_kinds
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.mamba import expansion, has_bias
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS
from mycli.runtime.checkpoint.gguf.selective import (
    SELECTIVE_BIASES,
    SELECTIVE_REQUIRES,
    selective_tensors,
    write_selective_keys,
)
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, MODEL_TENSORS, TensorRule
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec


def _read_period(model: GgufModel, key: str, kind: str, present: Sequence[bool]) -> Config:
    """Return the config fields by which the layers `present` are of a kind; `key` says which, for an error."""
    indices, layers = [index for index, value in enumerate(present) if value], len(present)
    offset = indices[0] if indices else layers
    period = indices[1] - offset if len(indices) > 1 else layers + 1
    if offset >= period or indices != list(range(offset, layers, period)):
        raise model.metadata.fail(model.key(key), f"the layers {indices} are not one in each few", "")
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": offset}


def _read_config(model: GgufModel, config: Config) -> Config:
    heads = model.layer_values("attention.head_count_kv", config["num_hidden_layers"])
    return {
        **_read_period(model, "attention.head_count_kv", "attn", [bool(count) for count in heads]),
        **_read_period(model, "expert_count", "expert", [kind == "sparse" for kind in layer_kinds(model, config)]),
        "num_experts": model.integer("expert_count", 0) or 1,
        "num_experts_per_tok": model.integer("expert_used_count", 0) or 1,
        "mamba_d_conv": model.integer("ssm.conv_kernel", low=1),
        "mamba_d_state": model.integer("ssm.state_size", low=1),
        "mamba_dt_rank": model.integer("ssm.time_step_rank", low=1),
        "mamba_expand": expansion(model),
        "mamba_conv_bias": has_bias(model, "ssm_conv1d"),
        "mamba_proj_bias": has_bias(model, "ssm_in"),
    }


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    mixed = any(isinstance(spec.mlp, ExpertsSpec) for spec in config.layer_specs)
    return {
        **write_selective_keys(config),
        "attention.head_count_kv": [0 if spec.recurrent else config.kv_heads for spec in config.layer_specs],
        "expert_count": len(experts_spec(config).experts) if mixed else 1,
        "expert_used_count": experts_spec(config).top_k if mixed else 1,
    }


ARCHITECTURE = Architecture(
    name="jamba",
    model_type="jamba",
    written_types=("jamba",),
    requires=(*SELECTIVE_REQUIRES, HIDDEN_WIDE_HEADS),
    biases=SELECTIVE_BIASES,
    layer_tensors={
        **LLAMA_TENSORS,
        **selective_tensors("mamba"),
        **{f"ssm_{part}_norm": TensorRule(f"mamba.{part}_layernorm") for part in ("dt", "b", "c")},
        "ffn_norm": TensorRule("pre_ff_layernorm"),
        **{f"ffn_{part}": TensorRule(f"feed_forward.{part}_proj") for part in ("gate", "up", "down")},
        **expert_tensors("feed_forward", router="router"),
    },
    model_tensors={**MODEL_TENSORS, "output_norm": TensorRule("model.final_layernorm")},
    by_layer=("attention.head_count_kv",),
    read_config=_read_config,
    write_keys=_write_keys,
)
