"""Products of fp32 matrices rounded to bf16, with fp32 sums, in C++ (rounded_cpu.cpp): for calibration.

They compute where torch's fp32 products may round to bf16 (`torch.backends.mkldnn.matmul.fp32_precision`), on
processors with fast bf16 dot products and without AMX, on which torch multiplies in fp32 all the same.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

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
    """x fp32 [rows, K] times weight fp32 [N, K] transposed, each rounded to bf16, with fp32 sums.

    Gradients are such products too, of operands rounded in the same way.
    """
    library = _ready(x, weight)
    if isinstance(library, Declined):
        return library
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        y: Tensor = _Product.apply(library, x, weight)  # type: ignore[no-untyped-call]  # torch's stub
        return y
    return _multiply(library, x, weight, len(weight))


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, library: Native, x: Tensor, weight: Tensor) -> Tensor:
        ctx.library = library
        ctx.save_for_backward(x, weight)
        return _multiply(library, x, weight, len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        slope, (x, weight) = gradients[0].contiguous(), ctx.saved_tensors
        _, needs_x, needs_weight = ctx.needs_input_grad
        by_x = _multiply(ctx.library, slope, weight, x.shape[1], by_inputs=True) if needs_x else None
        by_weight = torch.zeros_like(weight) if needs_weight else None
        if by_weight is not None:
            _add_outer(ctx.library, by_weight, slope, x, len(weight))
        return None, by_x, by_weight


def _multiply(library: Native, x: Tensor, weight: Tensor, outputs: int, *, by_inputs: bool = False) -> Tensor:
    # The weight is [outputs, inputs], or [inputs, outputs] by inputs.
    rows, inputs = x.shape
    y = torch.empty(rows, outputs)
    pointers = x.data_ptr(), rows, inputs, weight.data_ptr(), outputs, y.data_ptr(), by_inputs
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
    if any(tensor.requires_grad for tensor in (sums, left, right)):
        return _OPERANDS
    _add_outer(library, sums, left, right, strip)
    return None


def _add_outer(library: Native, sums: Tensor, left: Tensor, right: Tensor, strip: int) -> None:
    rows = len(left)
    pointers = left.data_ptr(), left.shape[1], right.data_ptr(), right.shape[1], rows, sums.data_ptr()
    if rows and library.rounded_outer(*pointers, strip, torch.get_num_threads()):
        raise no_memory_error(rows, left.shape[1])


def _ready(*tensors: Tensor) -> Native | Declined:
    backend: Any = torch.backends.mkldnn  # its attributes have no static types
    if backend.matmul.fp32_precision != "bf16":
        return _PRECISION
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_cpu or not tensor.is_contiguous():
            return _OPERANDS
    return _library()


def _library() -> Native | Declined:
    library = build.native()
    return library if isinstance(library, Declined) or library.rounds else _PROCESSOR
