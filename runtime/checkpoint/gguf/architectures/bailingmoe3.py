"""Ling 3.0: Kimi Delta Attention in most layers, latent attention gated by head in the others."""

from array import array
from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.experts import (
    EXPERT_GROUPS,
    NORM_KEY,
    SCALE_KEY,
    SIGMOID,
    expert_keys,
    expert_tensors,
    shared_size_key,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.kimi_delta import (
    EQUAL_HEADS,
    delta_tensors,
    kimi_delta,
    latent_tensors,
    read_latent_keys,
    read_recurrent_layers,
    write_kimi_keys,
)
from mycli.runtime.checkpoint.gguf.requirements import Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule, ValueChange
from mycli.runtime.models.config import ModelConfig

_TENSORS = {
    **LLAMA_TENSORS,
    **expert_tensors(shared="shared_experts", bias="gate.expert_bias"),
    **latent_tensors("attention"),
    **delta_tensors(
        "attention", "dense", ValueChange(store=lambda decay: decay.exp(), load=lambda stored: stored.log())
    ),
    "ssm_f_a": TensorRule("attention.f_proj"),
    "ssm_g_a": TensorRule("attention.g_proj"),
    "attn_gate": TensorRule("attention.g_proj"),
}
# With positions of images llama.cpp rotates halves, without them neighbours.
_UNSUPPORTED = ("rope.dimension_sections", "swiglu_clamp_exp", "swiglu_clamp_shexp")


def _read_config(model: GgufModel, config: Config) -> Config:
    for name in _UNSUPPORTED:
        stored = model.metadata.values.get(model.key(name))
        if any(stored) if isinstance(stored, list | array) else stored:
            raise model.metadata.fail(model.key(name), "is not supported")
    recurrent = read_recurrent_layers(model, config["num_hidden_layers"])
    return {
        **read_latent_keys(model, config["head_dim"]),
        "num_key_value_heads": config["num_attention_heads"],
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": model.integer("kda.head_dim", low=1),
        "linear_conv_kernel_dim": model.integer("ssm.conv_kernel", low=1),
        "layer_types": ["linear_attention" if value else "full_attention" for value in recurrent],
        "kda_safe_gate": model.boolean("kda.safe_gate", True),
        "kda_lower_bound": model.number("kda.gate_lower_bound", -5.0),
        "num_shared_experts": model.integer("expert_shared_count", 0),
        "first_k_dense_replace": model.integer("leading_dense_block_count", 0),
        "n_group": model.integer("expert_group_count", 1) or 1,
        "topk_group": model.integer("expert_group_used_count", 1) or 1,
    }


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    floor = kimi_delta(config).floor
    return {**write_kimi_keys(config), "kda.safe_gate": floor != 0.0, "kda.gate_lower_bound": -abs(floor)}


ARCHITECTURE = Architecture(
    name="bailingmoe3",
    model_type="bailing_hybrid",
    written_types=("bailing_hybrid",),
    biases=(),
    requires=(
        *EXPERT_GROUPS,
        Requirement("decays with a lower bound, kda_safe_gate", lambda config: kimi_delta(config).floor != 0.0),
        EQUAL_HEADS,
    ),
    latent=True,
    has_mtp_blocks=True,
    layer_tensors=_TENSORS,
    # g_proj gates the channels of one kind of layer and the heads of the other.
    recurrent_tensors={"ssm_g_a": _TENSORS["ssm_g_a"]},
    keys=(*expert_keys(), shared_size_key("moe_shared_expert_intermediate_size"), SCALE_KEY, NORM_KEY),
    by_layer=("attention.head_count_kv",),
    gating=(SIGMOID,),
    read_config=_read_config,
    write_keys=_write_keys,
)
