"""Reads GGUF files with the `gguf` package of llama.cpp, which decodes all types in numpy and computes no logits."""

import sys

from mycli.quant.readers import Names, Reading, Task, parse_reading, run_child
from mycli.runtime.checkpoint.gguf_parts import is_gguf
from mycli.runtime.errors import ModelError

WEIGHT_NAMES: Names = "gguf"


def read(task: Task) -> Reading:
    """See `ReaderModule.read`."""
    if not is_gguf(task.model):
        raise ModelError(f"{task.model}: gguf-py reads GGUF files only", "name the .gguf file")
    python = str(task.program or sys.executable)
    return parse_reading(run_child(task, python, "_gguf_child.py", ("gguf",), "the gguf package"), 0.0)
