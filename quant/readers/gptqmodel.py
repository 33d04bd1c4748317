"""Reads GPTQ and AWQ folders with GPTQModel, which keeps the experts of a mixture apart, unlike transformers."""

import sys

from mycli.quant.readers import HALF_TOLERANCE, Names, Reading, Task, parse_reading, quantization_method, run_child
from mycli.runtime.errors import ModelError

WEIGHT_NAMES: Names = "hf"
_METHODS = ("gptq", "awq")


def read(task: Task) -> Reading:
    """See `ReaderModule.read`."""
    method = quantization_method(task.model)
    if method not in _METHODS:
        raise ModelError(f"{task.model}: GPTQModel reads GPTQ and AWQ folders only", "transformers reads other folders")
    python = str(task.program or sys.executable)
    return parse_reading(run_child(task, python, "_gptqmodel_child.py", ("gptqmodel",), "GPTQModel"), HALF_TOLERANCE)
