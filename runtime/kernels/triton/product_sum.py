"""A product that also returns sums of squares of its rows by piece, for a norm that follows it."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from mycli.runtime.kernels.triton.product.matmul import Activation, FewRowsProduct, check_contiguous
from mycli.runtime.kernels.triton.split_k import Epilogue, add_parts


class SumArguments(NamedTuple):
    """The epilogue's arguments."""

    y: Any  # [rows, size]
    size: Any
    bias: Any  # [size] or None
    squares: Any  # fp32 [pieces, padded rows]
    rows_padded: Any
    SPAN: Any  # columns of a piece
    BLOCK: Any  # a power of two, at least SPAN
    ROWS: Any  # rows at a time


@triton.jit
def sum_epilogue(parts, count, piece, first, rows, args):
    """Store the sum of parts [count, rows, size] with the bias, rounded, and the sum of squares of a piece."""
    row, lane = first + tl.arange(0, args.ROWS), tl.arange(0, args.BLOCK)
    column = piece * args.SPAN + lane
    inside = (row < rows)[:, None] & ((lane < args.SPAN) & (column < args.size))[None, :]
    place = row[:, None] * args.size + column[None, :]
    DTYPE: tl.constexpr = args.y.dtype.element_ty
    total = add_parts(parts, place, count, rows * args.size, inside).to(DTYPE).to(tl.float32)
    if args.bias is not None:
        bias = tl.load(args.bias + column, mask=column < args.size, other=0.0).to(tl.float32)
        total = tl.where(inside, total + bias[None, :], 0.0).to(DTYPE).to(tl.float32)
    tl.store(args.y + place, total.to(DTYPE), mask=inside)
    tl.store(args.squares + piece * args.rows_padded + row, tl.sum(total * total, axis=1), mask=row < rows)


def sum_parts(
    x: Activation, product: FewRowsProduct, dtype: torch.dtype, span: int, counters: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the product [rows, n] in `dtype` and sums of squares, fp32 [pieces of `span` columns, padded rows].

    counters: int32 zeros, one per block of rows and piece; zeros afterwards.
    """
    check_contiguous(bias)
    rows, device = x.values.shape[0], x.values.device
    y = torch.empty((rows, product.n), dtype=dtype, device=device)
    squares = torch.empty((-(-product.n // span), x.sums.shape[1]), dtype=torch.float32, device=device)
    block = triton.next_power_of_2(span)
    constants = map(constexpr, (span, block, x.tile.rows_at_once(rows)))
    args = SumArguments(y, product.n, bias, squares, squares.shape[1], *constants)
    product.partial(x, epilogue=Epilogue(sum_epilogue, counters, args, constexpr(span), constexpr(1)))
    return y, squares
