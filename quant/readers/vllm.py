"""Reads folders with vLLM; logits only, because it repacks weights for its kernels when it loads them."""

import sys

from mycli.quant.readers import Names, Reading, Task, parse_reading, run_child
from mycli.runtime.errors import ModelError

WEIGHT_NAMES: Names = "hf"
_TOLERANCE = 0.1  # nats: vLLM computes in bf16


def read(task: Task) -> Reading:
    """See `ReaderModule.read`."""
    if not task.model.is_dir():
        raise ModelError(f"{task.model}: vLLM reads folders only", "gguf-py and llama.cpp read GGUF files")
    python = str(task.program or sys.executable)
    return parse_reading(run_child(task, python, "_vllm_child.py", ("vllm",), "vLLM"), _TOLERANCE)
