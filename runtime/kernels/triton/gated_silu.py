"""SiLU(gate) * up of a product whose rows are gate and up, as the operand of the product that follows.

What the plain model would round to its dtype is rounded to it here.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from mycli.runtime.kernels.triton.pdl import pdl_wait
from mycli.runtime.kernels.triton.product.activation import columns_of, some_tiles, store_activation
from mycli.runtime.kernels.triton.product.matmul import Activation, TritonMatmul, check_contiguous
from mycli.runtime.kernels.triton.product.tiles import Tile
from mycli.runtime.kernels.triton.split_k import Epilogue, add_parts

_SPAN = 128  # columns of a program that does nothing else


class Gated(NamedTuple):
    """Where SiLU(gate) * up goes."""

    size: Any  # of gate, and of up
    into: Any
    ROWS: Any  # at a time
    TILES: Any
    DTYPE: Any  # the plain model's


@triton.jit
def silu_epilogue(parts, count, piece, row, rows, given):
    """SiLU(gate) * up from parts [count, rows, 2 * size]: gate, up."""
    row, tile = some_tiles(row, piece * given.TILES, given.ROWS, given.TILES)
    column = columns_of(tile, given.into)
    inside = (row[:, None] < rows) & (column < given.size)
    place, stride = row[:, None] * (2 * given.size) + column, rows * given.size * 2
    gate = add_parts(parts, place, count, stride, inside).to(given.DTYPE).to(tl.float32)
    up = add_parts(parts, place + given.size, count, stride, inside).to(given.DTYPE).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(given.DTYPE).to(tl.float32)
    value = (active * up).to(given.DTYPE).to(tl.float32)
    store_activation(value, row, tile, (row < rows) & (tile < given.into.tiles), given.into)


@triton.jit(do_not_specialize=["count", "rows"])
def silu_kernel(parts, count, rows, given, PDL: tl.constexpr):
    """Grid (pieces, rows). The epilogue as a launch of its own."""
    if PDL:
        pdl_wait()
    silu_epilogue(parts, count, tl.program_id(0), tl.program_id(1), rows, given)


def activate(
    x: Activation, product: TritonMatmul, dtype: torch.dtype, following: TritonMatmul, counters: Tensor
) -> Activation:
    """SiLU(gate) * up of the product, gate first, as the operand of the one that follows. counters: as in `add`."""
    rows = x.values.shape[0]
    into = following.activation(rows)
    span = max(x.tile.block_n, into.tile_k)
    given = _gated(into, product.n // 2, x.tile.rows_at_once(rows, 2 * span), span, dtype)
    product.partial(x, epilogue=Epilogue(silu_epilogue, counters, given, constexpr(span), constexpr(2)))
    return into


def activate_parts(parts: Tensor, dtype: torch.dtype, following: TritonMatmul, tile: Tile) -> Activation:
    """SiLU(gate) * up of a product in parts, fp32 [count, rows, 2 * size], as the operand of a product of `tile`."""
    check_contiguous(parts)
    count, rows, width = parts.shape
    into = following.activation(rows, tile)
    span, pdl = max(_SPAN, into.tile_k), following.chip.pdl
    given = _gated(into, width // 2, 1, span, dtype)
    grid = (-(-width // 2 // span), rows)
    silu_kernel[grid](parts, count, rows, given, PDL=pdl, launch_pdl=pdl, num_warps=1)
    return into


def _gated(into: Activation, size: int, rows: int, span: int, dtype: torch.dtype) -> Gated:
    """`rows` at a time, of pieces of `span` columns."""
    rounded = tl.bfloat16 if dtype is torch.bfloat16 else tl.float16
    return Gated(size, into.operand(), *(constexpr(each) for each in (rows, span // into.tile_k, rounded)))
