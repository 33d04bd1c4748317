"""GLM-4-0414: norms before and after each part, gate and up in one tensor, half of each head rotated."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule

SECTIONS = "glm4.rope.dimension_sections"  # of image positions
ARCHITECTURE = Architecture(
    name="glm4",
    model_type="glm4",
    written_types=("glm4",),
    reads=lambda header, experts: not header.metadata.has(SECTIONS),
    has_mtp_blocks=True,
    layer_tensors={
        **LLAMA_TENSORS,
        "ffn_up": TensorRule("mlp.gate_up_proj"),
        "post_attention_norm": TensorRule("post_self_attn_layernorm"),
        "post_ffw_norm": TensorRule("post_mlp_layernorm"),
    },
    read_config=lambda model, config: {"attention_bias": "blk.0.attn_q.bias" in model.tensors},
)
