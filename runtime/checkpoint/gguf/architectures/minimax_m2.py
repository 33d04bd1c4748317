"""MiniMax-M2: norms over all heads of queries and keys, sigmoid-routed experts with a correction bias."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.experts import SIGMOID, expert_keys, expert_tensors, experts_spec
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS

ARCHITECTURE = Architecture(
    name="minimax-m2",
    model_type="minimax_m2",
    written_types=("minimax_m2",),
    own_head=True,
    layer_tensors={
        **LLAMA_TENSORS,
        **expert_tensors("block_sparse_moe", gate="w1", up="w3", down="w2", bias="e_score_correction_bias"),
    },
    keys=expert_keys("num_local_experts", size=None),
    gating=(SIGMOID,),
    write_keys=lambda config: {
        "expert_gating_func": SIGMOID,
        "expert_feed_forward_length": experts_spec(config).size,
    },
)
