"""ERNIE 4.5 with experts: softmax-routed with a correction bias, shared experts without a gate."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, GgufKey
from mycli.runtime.checkpoint.gguf.experts import (
    SOFTMAX,
    dense_layers_key,
    expert_keys,
    expert_tensors,
    shared_count_key,
    shared_size,
)
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS

ARCHITECTURE = Architecture(
    name="ernie4_5-moe",
    model_type="ernie4_5_moe",
    written_types=("ernie4_5_moe",),
    requires=(WHOLE_ROTATION,),
    layer_tensors={
        **LLAMA_TENSORS,
        **expert_tensors(shared="shared_experts", bias="moe_statics.e_score_correction_bias"),
    },
    keys=(
        *expert_keys("moe_num_experts", "moe_k"),
        shared_count_key("moe_num_shared_experts"),
        dense_layers_key("moe_layer_start_index"),
        GgufKey("interleave_moe_layer_step", "moe_layer_interval", write=lambda config: 1),
    ),
    gating=(SOFTMAX,),
    # llama.cpp reads the shared experts by their size alone.
    write_keys=lambda config: {"expert_shared_feed_forward_length": shared_size(config)},
)
