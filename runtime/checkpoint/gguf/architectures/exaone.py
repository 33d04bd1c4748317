"""EXAONE 3, 3.5 and Deep: Llama, whose queries and keys stay in Hugging Face's order."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, WHOLE_ROTATION

ARCHITECTURE = Architecture(
    name="exaone",
    model_type="exaone",
    written_types=("exaone",),
    requires=(HIDDEN_WIDE_HEADS, WHOLE_ROTATION),
    read_config=linear_biases,
)
