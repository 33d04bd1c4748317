"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and rows as Hugging Face has them."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, WHOLE_ROTATION

ARCHITECTURE = Architecture(
    name="qwen2",
    model_type="qwen2",
    written_types=("qwen2",),
    requires=(HIDDEN_WIDE_HEADS, WHOLE_ROTATION),
)
