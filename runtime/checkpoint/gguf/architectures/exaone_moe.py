"""K-EXAONE: EXAONE 4's windows, sigmoid-routed experts with a correction bias, and shared experts."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.architectures.exaone4 import WINDOW_KEY
from mycli.runtime.checkpoint.gguf.experts import (
    EXPERT_GROUPS,
    GROUP_KEYS,
    NORM_KEY,
    SCALE_KEY,
    SIGMOID,
    dense_layers_key,
    expert_keys,
    expert_tensors,
    shared_count_key,
    shared_size,
)
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS

ARCHITECTURE = Architecture(
    name="exaone-moe",
    model_type="exaone_moe",
    written_types=("exaone_moe",),
    requires=(WHOLE_ROTATION, *EXPERT_GROUPS),
    own_head=True,
    has_mtp_blocks=True,
    layer_tensors={
        **LLAMA_TENSORS,
        **expert_tensors(shared="shared_experts", bias="e_score_correction_bias"),
    },
    keys=(
        *expert_keys(),
        *GROUP_KEYS,
        shared_count_key("num_shared_experts"),
        dense_layers_key("first_k_dense_replace"),
        SCALE_KEY,
        NORM_KEY,
        WINDOW_KEY,
    ),
    slides=lambda layer: (layer + 1) % 4 != 0,
    pattern=True,
    gating=(SIGMOID,),
    write_keys=lambda config: {
        "expert_shared_feed_forward_length": shared_size(config),
        "expert_gating_func": SIGMOID,
    },
)
