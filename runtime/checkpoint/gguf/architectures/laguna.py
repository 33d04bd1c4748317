"""Laguna: attention gated by softplus, query heads by layer, windows, sigmoid-routed experts and a shared expert."""

from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.architectures.exaone4 import WINDOW_KEY, full_attention
from mycli.runtime.checkpoint.gguf.experts import (
    NORM_KEY,
    SIGMOID,
    dense_layers_key,
    expert_keys,
    expert_tensors,
    require_norm,
    scale_key,
    shared_size_key,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import Requirement
from mycli.runtime.checkpoint.gguf.rope import sliding_rope_keys, sliding_rope_parameters
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule
from mycli.runtime.models.config import ModelConfig

_ROTATED_SLIDING = "rope.dimension_count_swa"


def _read_config(model: GgufModel, config: Config) -> Config:
    require_norm(model)
    heads = model.layer_values("attention.head_count", config["num_hidden_layers"])
    gate = model.tensors.get("blk.0.attn_gate.weight")
    ropes = sliding_rope_parameters(model, config["rope_parameters"])
    if model.has(_ROTATED_SLIDING):
        ropes["sliding_attention"]["partial_rotary_factor"] = model.integer(_ROTATED_SLIDING) / config["head_dim"]
    full = full_attention(model, config)
    full.pop("sliding_window", None)  # which is not null in transformers' config
    return {
        **full,
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if gate is not None and gate.shape[0] == heads[0] else "per-element",
        "rope_parameters": ropes,
    }


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    attentions = [layer.attention for layer in config.layer_specs]
    rotated = [attention.rope.dim for attention in attentions if attention.window and attention.rope]
    return {
        "attention.head_count": [attention.heads for attention in attentions],
        **sliding_rope_keys(config),
        **({_ROTATED_SLIDING: rotated[0]} if rotated else {}),
        NORM_KEY.name: True,
        "expert_gating_func": SIGMOID,
    }


ARCHITECTURE = Architecture(
    name="laguna",
    model_type="laguna",
    written_types=("laguna",),
    requires=(
        # It takes the first layer's rotated part of a head for that of all layers without a window.
        Requirement("full attention in the first layer", lambda config: config.layer_specs[0].attention.window is None),
    ),
    layer_tensors={
        **LLAMA_TENSORS,
        **expert_tensors(shared="shared_expert", bias="experts.e_score_correction_bias"),
        "attn_gate": TensorRule("self_attn.g_proj"),
    },
    keys=(
        *expert_keys(),
        shared_size_key(),
        dense_layers_key("first_k_dense_replace"),
        scale_key("moe_routed_scaling_factor"),
        WINDOW_KEY,
    ),
    slides=lambda layer: layer % 4 != 0,
    pattern=True,
    by_layer=("attention.head_count",),
    gating=(SIGMOID,),
    read_config=_read_config,
    write_keys=_write_keys,
)
