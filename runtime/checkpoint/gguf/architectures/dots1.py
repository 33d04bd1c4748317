"""dots.llm1: Qwen 3's attention, sigmoid-routed experts with a correction bias and shared experts."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, linear_biases
from mycli.runtime.checkpoint.gguf.experts import (
    NORM_KEY,
    SCALE_KEY,
    SIGMOID,
    dense_layers_key,
    expert_keys,
    expert_tensors,
    shared_count_key,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION, Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS


def _read_config(model: GgufModel, config: Config) -> Config:
    return {**linear_biases(model, config), "sliding_window": None}


ARCHITECTURE = Architecture(
    name="dots1",
    model_type="dots1",
    written_types=("dots1",),
    requires=(
        WHOLE_ROTATION,
        Requirement("as many key-value heads as query heads", lambda config: config.kv_heads == config.heads),
    ),
    own_head=True,
    layer_tensors={
        **LLAMA_TENSORS,
        **expert_tensors(shared="shared_experts", bias="gate.e_score_correction_bias"),
    },
    keys=(
        *expert_keys("n_routed_experts"),
        shared_count_key(),
        dense_layers_key("first_k_dense_replace"),
        SCALE_KEY,
        NORM_KEY,
    ),
    gating=(SIGMOID,),
    read_config=_read_config,
    write_keys=lambda config: {"expert_gating_func": SIGMOID},
)
