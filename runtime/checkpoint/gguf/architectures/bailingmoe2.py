"""Ling and Ring 2.0: norms of queries and keys, sigmoid-routed experts with a correction bias, a shared expert."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, GgufKey
from mycli.runtime.checkpoint.gguf.experts import (
    EXPERT_GROUPS,
    GROUP_KEYS,
    NORM_KEY,
    SCALE_KEY,
    SIGMOID,
    dense_layers_key,
    expert_keys,
    expert_tensors,
    experts_spec,
    shared_size,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule
from mycli.runtime.models.config import ModelConfig


def _read_config(model: GgufModel, config: Config) -> Config:
    return {
        "score_function": "sigmoid",
        "num_shared_experts": model.integer("expert_shared_count", 0),
        "use_qkv_bias": "blk.0.attn_qkv.bias" in model.tensors,
        "use_qk_norm": True,
    }


def _shared_count(config: ModelConfig) -> int:
    # llama.cpp multiplies the shared size with it.
    count, odd = divmod(shared_size(config), experts_spec(config).size)
    return 1 if odd else count


ARCHITECTURE = Architecture(
    name="bailingmoe2",
    model_type="bailing_moe",
    written_types=("bailing_moe",),
    requires=(
        *EXPERT_GROUPS,
        HIDDEN_WIDE_HEADS,
        Requirement("score_function = sigmoid", lambda config: experts_spec(config).routing.scoring == "sigmoid"),
        Requirement("norms of queries and keys", lambda config: config.qk_norm),
        Requirement("a shared expert", lambda config: experts_spec(config).shared is not None),
    ),
    own_head=True,
    has_mtp_blocks=True,
    layer_tensors={
        **{name: rule for name, rule in LLAMA_TENSORS.items() if name not in ("attn_q", "attn_k", "attn_v")},
        **expert_tensors(shared="shared_experts", bias="gate.expert_bias"),
        "attn_qkv": TensorRule("attention.query_key_value"),
        "attn_output": TensorRule("attention.dense"),
        "attn_q_norm": TensorRule("attention.query_layernorm"),
        "attn_k_norm": TensorRule("attention.key_layernorm"),
    },
    keys=(
        *expert_keys(),
        *GROUP_KEYS,
        GgufKey(
            "expert_shared_feed_forward_length",
            "moe_shared_expert_intermediate_size",
            write=lambda config: shared_size(config) // _shared_count(config),
        ),
        dense_layers_key("first_k_dense_replace"),
        SCALE_KEY,
        NORM_KEY,
    ),
    gating=(SIGMOID,),
    read_config=_read_config,
    write_keys=lambda config: {"expert_gating_func": SIGMOID, "expert_shared_count": _shared_count(config)},
)
