"""Products of fp32 matrices rounded to bf16, with fp32 sums, in C++ (rounded_cpu.cpp): for calibration.

They compute where torch's fp32 products may round to bf16 (`torch.backends.mkldnn.matmul.fp32_precision`), on
processors with fast bf16 dot products and without AMX, on which torch multiplies in fp32 all the same.
"""

from typing import Any

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import Native
from mycli.runtime.kernels.cpu.matmul import no_memory_error

_PRECISION = Declined("fp32-products-not-rounded")
_OPERANDS = Declined("cpu-contiguous-without-gradient")
_PROCESSOR = Declined("no-fast-bf16-dots")


def rounds() -> bool:
    """Return whether this processor has a kernel of rounded products."""
    return not isinstance(_library(), Declined)


def is_rounding() -> bool:
    """Return whether fp32 products round their operands now."""
    backend: Any = torch.backends.mkldnn  # its attributes have no static types
    return backend.matmul.fp32_precision == "bf16" and rounds()


def rounded_product(x: Tensor, weight: Tensor) -> Tensor | Declined:
    """x fp32 [rows, K] times weight fp32 [N, K] transposed, each rounded to bf16, with fp32 sums."""
    library = _ready(x, weight)
    if isinstance(library, Declined):
        return library
    (rows, inputs), outputs = x.shape, len(weight)
    y = torch.empty(rows, outputs)
    pointers = x.data_ptr(), rows, inputs, weight.data_ptr(), outputs, y.data_ptr()
    if rows and library.rounded_matmul(*pointers, torch.get_num_threads()):
        raise no_memory_error(rows, inputs)
    return y


def add_rounded_outer(sums: Tensor, left: Tensor, right: Tensor, strip: int) -> Declined | None:
    """Add left^T right, each rounded to bf16, to fp32 sums [M, N]; left [rows, M], right [rows, N].

    strip: of each strip of this many rows of sums, the columns after the strip's end may be left out.
    """
    library = _ready(left, right, sums)
    if isinstance(library, Declined):
        return library
    rows = len(left)
    pointers = left.data_ptr(), left.shape[1], right.data_ptr(), right.shape[1], rows, sums.data_ptr()
    if rows and library.rounded_outer(*pointers, strip, torch.get_num_threads()):
        raise no_memory_error(rows, left.shape[1])
    return None


def _ready(*tensors: Tensor) -> Native | Declined:
    backend: Any = torch.backends.mkldnn  # its attributes have no static types
    if backend.matmul.fp32_precision != "bf16":
        return _PRECISION
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_cpu or not tensor.is_contiguous() or tensor.requires_grad:
            return _OPERANDS
    return _library()


def _library() -> Native | Declined:
    library = build.native()
    return library if isinstance(library, Declined) or library.rounds else _PROCESSOR
