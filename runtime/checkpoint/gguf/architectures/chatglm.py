"""GLM-4-9B (2024) and GLM-Edge: gate and up in one tensor, half of each head rotated."""

from mycli.runtime.checkpoint.gguf.architecture import LLAMA_TENSORS, Architecture, TensorRule
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS

ARCHITECTURE = Architecture(
    name="chatglm",
    model_type="glm",
    written_types=("glm",),
    requires=(HIDDEN_WIDE_HEADS,),
    layer_tensors={**LLAMA_TENSORS, "ffn_up": TensorRule("mlp.gate_up_proj")},
    read_config=lambda model, config: {"attention_bias": "blk.0.attn_q.bias" in model.tensors},
)
