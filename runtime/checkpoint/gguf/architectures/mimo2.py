"""MiMo-V2-Flash: windows with sinks and twice the key heads, values narrower than keys, many experts."""

from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.architectures.exaone4 import WINDOW_KEY
from mycli.runtime.checkpoint.gguf.experts import (
    EXPERT_GROUPS,
    SIGMOID,
    expert_keys,
    expert_tensors,
    experts_spec,
    layer_kinds,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import Requirement
from mycli.runtime.checkpoint.gguf.rope import sliding_rope_keys, sliding_rope_parameters
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule
from mycli.runtime.models.config import ModelConfig


def _read_config(model: GgufModel, config: Config) -> Config:
    layers = config["num_hidden_layers"]
    heads = model.layer_values("attention.head_count_kv", layers)
    slides = [bool(value) for value in model.layer_values("attention.sliding_window_pattern", layers)]
    full = min(heads)
    if any(count != full * (2 if slide else 1) for count, slide in zip(heads, slides, strict=True)):
        problem = "is not twice as many in layers with a window as in the others, which is not supported"
        raise model.metadata.fail(model.key("attention.head_count_kv"), problem)
    return {
        "num_key_value_heads": full,
        "v_head_dim": model.integer("attention.value_length", low=1),
        "attention_value_scale": model.number("attention.value_scale", 0.0) or None,
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "rope_parameters": sliding_rope_parameters(model, config["rope_parameters"]),
        "mlp_layer_types": layer_kinds(model, config),
        "norm_topk_prob": True,
        "n_group": model.integer("expert_group_count", 1) or 1,
        "topk_group": model.integer("expert_group_used_count", 1) or 1,
    }


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    attentions, routing = [layer.attention for layer in config.layer_specs], experts_spec(config).routing
    first = attentions[0]
    return {
        "attention.head_count_kv": [attention.kv_heads for attention in attentions],
        "attention.value_length": first.value_dim or first.head_dim,
        "attention.value_scale": float(first.value_scale),
        **sliding_rope_keys(config),
        "expert_gating_func": SIGMOID,
        "expert_group_count": routing.groups,
        "expert_group_used_count": routing.top_groups,
    }


ARCHITECTURE = Architecture(
    name="mimo2",
    model_type="mimo_v2_flash",
    written_types=("mimo_v2_flash",),
    requires=(
        *EXPERT_GROUPS,
        Requirement(
            "routed experts with normalized weights and a scale of 1",
            lambda config: experts_spec(config).routing.normalize and experts_spec(config).routing.scale == 1.0,
        ),
    ),
    own_head=True,
    has_mtp_blocks=True,
    value_length=True,
    layer_tensors={
        **LLAMA_TENSORS,
        **expert_tensors(bias="gate.e_score_correction_bias"),
        "attn_sinks": TensorRule("self_attn.attention_sink_bias", suffixes={".weight": ""}),
    },
    keys=(*expert_keys("n_routed_experts"), WINDOW_KEY),
    pattern=True,
    slides=lambda layer: layer != 0 and (layer + 1) % 6 != 0,
    by_layer=("attention.head_count_kv",),
    gating=(SIGMOID,),
    read_config=_read_config,
    write_keys=_write_keys,
)
