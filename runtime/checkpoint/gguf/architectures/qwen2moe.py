"""Qwen 1.5 and 2 with experts: a shared expert with a gate, weights that are not normalized."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.experts import expert_keys, expert_tensors, shared_size_key
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule

SHARED_TENSORS = {
    **expert_tensors(shared="shared_expert"),
    "ffn_gate_inp_shexp": TensorRule("mlp.shared_expert_gate"),
}
ARCHITECTURE = Architecture(
    name="qwen2moe",
    model_type="qwen2_moe",
    written_types=("qwen2_moe",),
    requires=(HIDDEN_WIDE_HEADS, WHOLE_ROTATION),
    own_head=True,
    layer_tensors={**LLAMA_TENSORS, **SHARED_TENSORS},
    keys=(*expert_keys(), shared_size_key()),
    read_config=lambda model, config: {"norm_topk_prob": False, "qkv_bias": "blk.0.attn_q.bias" in model.tensors},
)
