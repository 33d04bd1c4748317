"""InternLM 2 and 2.5: Llama, whose q, k and v the converter takes apart."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS

ARCHITECTURE = Architecture(
    name="internlm2",
    model_type="llama",
    layer_tensors=PAIRED_TENSORS,
    read_config=linear_biases,
)
