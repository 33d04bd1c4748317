"""Reads a GGUF file with the `gguf` package: python _gguf_child.py MODEL TOKENS ANSWER. Imports nothing of mycli."""

import hashlib
import importlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

_DENSE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _digests(values: Any, numpy: Any) -> list[str]:
    rows = numpy.ascontiguousarray(values, dtype=numpy.float32) + numpy.float32(0)  # minus zero counts as zero
    return [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows]


def _main(model: str, answer: str) -> None:
    gguf, numpy = importlib.import_module("gguf"), importlib.import_module("numpy")
    weights = {}
    for tensor in gguf.GGUFReader(model).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        shape = [int(size) for size in reversed(tensor.shape)]
        rows = values.reshape(-1, shape[-1]) if len(shape) > 1 else values.reshape(1, -1)
        kind = tensor.tensor_type.name
        weights[tensor.name] = {
            "dtype": _DENSE.get(kind, "float32"),
            "shape": shape,
            "rows": _digests(rows, numpy),
        }
    program = f"gguf {importlib.metadata.version('gguf')}"
    Path(answer).write_text(json.dumps({"program": program, "weights": weights}), encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[3])
