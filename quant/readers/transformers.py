"""Reads dense and packed folders with transformers."""

import sys

from mycli.quant.readers import Names, Reading, Task, parse_reading, run_child
from mycli.runtime.errors import ModelError
from mycli.runtime.utils.json_fields import read_object

WEIGHT_NAMES: Names = "hf"
_TOLERANCE = 1e-3  # nats: both compute in fp32, with sums in another order
_HALF_TOLERANCE = 0.25  # GPTQModel computes in the 16-bit type of the model, whose logits are rounded to it
# The packages that transformers needs for a method.
_PACKAGES = {
    "compressed-tensors": ("compressed_tensors",),
    "gptq": ("optimum", "gptqmodel"),
    "awq": ("accelerate", "gptqmodel"),
}


def read(task: Task) -> Reading:
    """See `ReaderModule.read`."""
    if not task.model.is_dir():
        raise ModelError(f"{task.model}: transformers reads folders only", "gguf-py and llama.cpp read GGUF files")
    raw = read_object(task.model / "config.json")
    settings = raw.values.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    packages = _PACKAGES.get(method, ()) if isinstance(method, str) else ()
    title = " with ".join(("transformers", *packages[-1:]))
    python = str(task.program or sys.executable)
    answer = run_child(task, python, "_transformers_child.py", ("transformers", "torch", *packages), title)
    return parse_reading(answer, _HALF_TOLERANCE if "gptqmodel" in packages else _TOLERANCE)
