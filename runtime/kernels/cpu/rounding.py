"""Rounding weights to a symmetric grid, and packing codes into words, on the CPU in C++ (quantize_cpu.cpp).

The results have the bits of the torch code that they replace, several times as fast; only `native_columns` sums in an
order of its own. Each function returns `Declined` for what it does not support.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import STORED_TYPES, CColumns, CRounding, pointer
from mycli.runtime.quantization.packed_weight import pack

_FIXED, _ABSMAX, _LEAST_SQUARES = 0, 1, 2  # `Search` of quantize_cpu.cpp
# Groups outside this range are summed in another order than torch sums them.
_MIN_GROUP, _MAX_GROUP = 8, (1 << 20) - 1
_BAD_WEIGHT = 2  # return code of `round_weight`
_MAX_COLUMNS = 128  # as in quantize_cpu.cpp


@dataclass(frozen=True)
class ScaleSearch:
    """How to choose the scale of a group whose weight of largest magnitude is w."""

    # `absmax`: |w| / divisor. Otherwise the scale of least (weighted) squared error among w / divisor, w times each of
    # `factors`, and `refits` least-squares steps from the best of these.

    divisor: float
    smallest: float  # bounds of the magnitude of a scale
    largest: float
    limit: float  # a weight of larger magnitude is declined
    absmax: bool = False
    factors: Sequence[float] = ()
    refits: int = 0


def native_round(
    weight: Tensor,
    scales: Tensor,
    bits: int,
    search: ScaleSearch | None = None,
    importance: Tensor | None = None,
    codes: Tensor | None = None,
    sums: Tensor | None = None,
) -> Declined | None:
    """Round weight [N, K] of bf16, fp16 or fp32 and return None, or return why it was not rounded."""
    # scales [N, groups]: read, or with `search` written, columns being weighted by importance fp32 [K]. Written if
    # present: codes uint8 [N, K]; sums fp64 [N, 2], the squared error of each row and its sum of squares.
    rows, columns = weight.shape
    tensors = [tensor for tensor in (weight, scales, importance, codes, sums) if tensor is not None]
    if not all(tensor.is_cpu and tensor.is_contiguous() and not tensor.requires_grad for tensor in tensors):
        return Declined("cpu-contiguous-without-gradient")
    if weight.dtype not in STORED_TYPES or scales.dtype not in STORED_TYPES:
        return Declined("rounding-dtypes", {"weight": weight.dtype, "scales": scales.dtype})
    group = columns // scales.shape[1]
    if not _MIN_GROUP <= group <= _MAX_GROUP:
        return Declined("rounding-group-size", {"group": group, "least": _MIN_GROUP, "most": _MAX_GROUP})
    library = build.native()
    if isinstance(library, Declined):
        return library
    task = CRounding(
        weight=weight.data_ptr(),
        importance=pointer(importance),
        scales=scales.data_ptr(),
        codes=pointer(codes),
        sums=pointer(sums),
        rows=rows,
        inputs=columns,
        group=group,
        weight_type=STORED_TYPES[weight.dtype],
        scale_type=STORED_TYPES[scales.dtype],
        bits=bits,
        search=_FIXED,
    )
    if search is not None:
        factors = (ctypes.c_float * len(search.factors))(*search.factors)
        task.factors, task.factor_count, task.refits = ctypes.addressof(factors), len(factors), search.refits
        task.search = _ABSMAX if search.absmax else _LEAST_SQUARES
        task.divisor, task.limit = search.divisor, search.limit
        task.smallest, task.largest = search.smallest, search.largest
    status: int = library.round_weight(ctypes.byref(task), torch.get_num_threads())
    if status == _BAD_WEIGHT:
        return Declined("weight-beyond-limit", {"limit": search.limit if search else None})
    return Declined("no-memory-for-a-row", {"columns": columns}) if status else None


def native_columns(
    residual: Tensor, matrix: Tensor, scales: Tensor, codes: Tensor | None, half: int
) -> tuple[Tensor, Tensor] | Declined:
    """`quant.rounding.columns.solve_block` for at most 128 columns: codes and shifts, or why it is not supported."""
    tensors = (residual, scales) if codes is None else (residual, scales, codes)
    if not all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors) or len(residual) > _MAX_COLUMNS:
        return Declined("columns-layout", {"columns": len(residual), "most": _MAX_COLUMNS})
    library = build.native()
    if isinstance(library, Declined):
        return library
    transposed = matrix.T.contiguous()
    new_codes, shifts = torch.empty(residual.shape, dtype=torch.uint8), torch.empty_like(residual)
    task = CColumns(
        *(tensor.data_ptr() for tensor in (residual, transposed, scales)),
        before=pointer(codes),
        codes=new_codes.data_ptr(),
        shifts=shifts.data_ptr(),
        columns=residual.shape[0],
        rows=residual.shape[1],
        half=half,
    )
    library.solve_columns(ctypes.byref(task), torch.get_num_threads())
    return new_codes, shifts


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """`packed_weight.pack`, in C++ if it can."""
    if not codes.is_cpu or codes.dtype != torch.uint8 or isinstance(library := build.native(), Declined):
        return pack(codes, bits)
    rows, columns = codes.shape
    words = (columns * bits + 31) // 32
    packed = torch.empty(rows, words, dtype=torch.int32)
    source = codes.contiguous()
    library.pack_codes(source.data_ptr(), rows, columns, bits, packed.data_ptr(), words, torch.get_num_threads())
    return packed
