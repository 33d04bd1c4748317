"""GLM-4-9B (2024) and GLM-Edge: gate and up in one tensor, half of each head rotated."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule

ARCHITECTURE = Architecture(
    name="chatglm",
    model_type="glm",
    written_types=("glm",),
    requires=(HIDDEN_WIDE_HEADS,),
    layer_tensors={**LLAMA_TENSORS, "ffn_up": TensorRule("mlp.gate_up_proj")},
    read_config=lambda model, config: {"attention_bias": "blk.0.attn_q.bias" in model.tensors},
)
