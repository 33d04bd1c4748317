"""Rounding weights to a symmetric grid, and packing codes into words, on the CPU by our own code.

The code is quantize_cpu.cpp: the same bits as the plain torch that it stands for, several times as fast; but columns in
turn, whose sums torch takes in an order of its own. Each function returns the reason where this code cannot. Knows
tensors and numbers; how scales are searched is said by its caller.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import STORED_TYPES, CColumns, CRounding
from mycli.runtime.quantization.packed_weight import pack

_GIVEN, _ABSMAX, _LEAST_SQUARES = 0, 1, 2  # `Search` of quantize_cpu.cpp
_VECTOR = 8  # fewer weights in a group are summed in another order
_MOST = 1 << 20  # and more
_BAD_WEIGHT = 2
_COLUMNS = 128  # `MOST_COLUMNS` there


@dataclass(frozen=True)
class ScaleSearch:
    """Scales of groups whose largest weight is w: |w| / divisor where `absmax`; else that of least (weighted) squared
    error among w / divisor, w times each of `factors`, and `refits` steps of least squares from the best of these.

    A scale's magnitude is kept from `smallest` to `largest`; no weight may be beyond `limit`.
    """

    divisor: float
    smallest: float
    largest: float
    limit: float
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
    """Round weight [N, K] of bf16, fp16 or fp32; None where that was done.

    scales [N, groups] are given, or found where there is a `search`, with columns weighted by importance fp32 [K].
    codes uint8 [N, K] are filled where given, and sums fp64 [N, 2]: squares of what a row lost, and of its weights.
    A weight beyond the limit of the search is a reason too.
    """
    rows, columns = weight.shape
    given = [each for each in (scales, importance, codes, sums) if each is not None]
    if not all(each.is_cpu and each.is_contiguous() and not each.requires_grad for each in (weight, *given)):
        return Declined("cpu-contiguous-without-gradient")
    if weight.dtype not in STORED_TYPES or scales.dtype not in STORED_TYPES:
        return Declined("rounding-dtypes", {"weight": weight.dtype, "scales": scales.dtype})
    group = columns // scales.shape[1]
    if not _VECTOR <= group < _MOST:
        return Declined("rounding-group-size", {"group": group, "least": _VECTOR, "most": _MOST - 1})
    library = build.native()
    if isinstance(library, Declined):
        return library
    task = CRounding(
        *(None if each is None else each.data_ptr() for each in (weight, importance)),
        scales=scales.data_ptr(),
        codes=None if codes is None else codes.data_ptr(),
        sums=None if sums is None else sums.data_ptr(),
        rows=rows,
        inputs=columns,
        group=group,
        weight_type=STORED_TYPES[weight.dtype],
        scale_type=STORED_TYPES[scales.dtype],
        bits=bits,
        search=_GIVEN,
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
    """As `quant.rounding.columns.solve_block`, of up to 128 columns."""
    given = (residual, scales) if codes is None else (residual, scales, codes)
    if not all(each.is_cpu and each.is_contiguous() for each in given) or len(residual) > _COLUMNS:
        return Declined("columns-layout", {"columns": len(residual), "most": _COLUMNS})
    library = build.native()
    if isinstance(library, Declined):
        return library
    turned = matrix.T.contiguous()
    found, shifts = torch.empty(residual.shape, dtype=torch.uint8), torch.empty_like(residual)
    task = CColumns(
        *(each.data_ptr() for each in (residual, turned, scales)),
        before=None if codes is None else codes.data_ptr(),
        codes=found.data_ptr(),
        shifts=shifts.data_ptr(),
        columns=residual.shape[0],
        rows=residual.shape[1],
        half=half,
    )
    library.solve_columns(ctypes.byref(task), torch.get_num_threads())
    return found, shifts


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """As `packed_weight.pack`, which does what this code cannot."""
    if not codes.is_cpu or codes.dtype != torch.uint8:
        return pack(codes, bits)
    library = build.native()
    if isinstance(library, Declined):
        return pack(codes, bits)
    rows, columns = codes.shape
    words = (columns * bits + 31) // 32
    packed = torch.empty(rows, words, dtype=torch.int32)
    given = codes.contiguous()
    library.pack_codes(given.data_ptr(), rows, columns, bits, packed.data_ptr(), words, torch.get_num_threads())
    return packed
