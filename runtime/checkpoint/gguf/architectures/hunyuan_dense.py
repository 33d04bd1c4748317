"""Hunyuan, dense: norms of queries and keys after the rotation."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule

HUNYUAN_TENSORS = {
    **LLAMA_TENSORS,
    "attn_q_norm": TensorRule("self_attn.query_layernorm"),
    "attn_k_norm": TensorRule("self_attn.key_layernorm"),
}
ARCHITECTURE = Architecture(
    name="hunyuan-dense",
    model_type="hunyuan_v1_dense",
    written_types=("hunyuan_v1_dense",),
    requires=(WHOLE_ROTATION,),
    layer_tensors=HUNYUAN_TENSORS,
    read_config=linear_biases,
)
