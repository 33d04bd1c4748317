"""Reads dense and packed folders with transformers."""

import sys

from mycli.quant.readers import HALF_TOLERANCE, Names, Reading, Task, parse_reading, quantization_method, run_child

WEIGHT_NAMES: Names = "hf"
_TOLERANCE = 1e-3  # nats: both compute in fp32, with sums in another order
# The packages that transformers needs for a method.
_PACKAGES = {
    "compressed-tensors": ("compressed_tensors",),
    "gptq": ("optimum", "gptqmodel"),
    "awq": ("accelerate", "gptqmodel"),
    "bitsandbytes": ("accelerate", "bitsandbytes"),
}
_ROUNDED = (("gptqmodel",), ("bitsandbytes",))  # they compute with weights in the 16-bit type of the model


def read(task: Task) -> Reading:
    """See `ReaderModule.read`."""
    packages = _PACKAGES.get(quantization_method(task.model), ())
    title = " with ".join(("transformers", *packages[-1:]))
    python = str(task.program or sys.executable)
    answer = run_child(task, python, "_transformers_child.py", ("transformers", "torch", *packages), title)
    return parse_reading(answer, HALF_TOLERANCE if packages[-1:] in _ROUNDED else _TOLERANCE)
