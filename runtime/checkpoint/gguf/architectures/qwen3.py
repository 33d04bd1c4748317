"""Qwen3, dense: norms on queries and keys."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION

ARCHITECTURE = Architecture(
    name="qwen3",
    model_type="qwen3",
    written_types=("qwen3",),
    requires=(WHOLE_ROTATION,),
    read_config=linear_biases,
)
