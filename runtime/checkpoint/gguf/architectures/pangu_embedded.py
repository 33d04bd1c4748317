"""openPangu Embedded: Llama with rows in Hugging Face's order and biases on q, k, v and o; read only."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION

ARCHITECTURE = Architecture(
    name="pangu-embedded",
    model_type="PanguEmbedded",
    requires=(WHOLE_ROTATION,),
    read_config=lambda model, config: {"attention_bias": "blk.0.attn_q.bias" in model.tensors},
)
