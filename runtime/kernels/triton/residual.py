"""The residual stream: what begins it, what is added to it, and from it the operand of the next product.

A program sees a piece of a row, so RMSNorm is split in two: the operand is the stream times the gain, with the sums of
squares of each piece beside it, and the product that takes it divides by the root of their mean (`RmsScale`).
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from mycli.runtime.kernels.triton.pdl import pdl_wait
from mycli.runtime.kernels.triton.product.activation import Operand, columns_of, some_tiles, store_activation
from mycli.runtime.kernels.triton.product.gemm import RmsScale
from mycli.runtime.kernels.triton.product.matmul import Activation, TritonMatmul, check_contiguous
from mycli.runtime.kernels.triton.product.tiles import Tile
from mycli.runtime.kernels.triton.split_k import Epilogue, add_parts


class Normed(NamedTuple):
    """Where the residual stream goes: into itself, and, weighed, into a product. `into` None: only the first."""

    stream: Any  # [rows, size]
    size: Any
    gain: Any  # [size]
    squares: Any  # fp32 [pieces, rows kept]
    into: Any
    ROWS: Any  # at a time
    TILES: Any  # of a piece


@triton.jit
def _weigh(x, first, row, tile, column, inside, piece, rows, given):
    """The stream x [tiles at hand, TILE_K] times the gain as an operand, and its sums of squares over the piece.

    first: of the ROWS rows.
    """
    wide = x.to(tl.float32)
    squares = tl.sum(tl.sum(wide * wide, axis=1).reshape(given.ROWS, given.TILES), axis=1)
    each = first + tl.arange(0, given.ROWS)
    tl.store(given.squares + piece * given.into.rows_kept + each, squares, mask=each < rows)
    gain = tl.load(given.gain + column, mask=inside, other=0.0).to(tl.float32)
    store_activation(wide * gain, row, tile, (row < rows) & (tile < given.into.tiles), given.into)


@triton.jit
def leave_sum(x, added, first, row, tile, column, inside, piece, rows, given):
    """The residual stream x [tiles at hand, TILE_K] with fp32 `added`, and from it the operand of the next product."""
    x = (x.to(tl.float32) + added.to(x.dtype).to(tl.float32)).to(x.dtype)
    tl.store(given.stream + row[:, None] * given.size + column, x, mask=inside)
    if given.gain is not None:
        _weigh(x, first, row, tile, column, inside, piece, rows, given)


@triton.jit
def add_epilogue(parts, count, piece, first, rows, given):
    """The residual stream with the product added, and from it the operand of the next."""
    row, tile = some_tiles(first, piece * given.TILES, given.ROWS, given.TILES)
    column = columns_of(tile, given.into)
    inside = (row[:, None] < rows) & (column < given.size)
    place = row[:, None] * given.size + column
    x = tl.load(given.stream + place, mask=inside, other=0.0)
    added = add_parts(parts, place, count, rows * given.size, inside)
    leave_sum(x, added, first, row, tile, column, inside, piece, rows, given)


@triton.jit
def embed_kernel(tokens, embedding, rows, given, PDL: tl.constexpr):
    """Grid (pieces, blocks of ROWS). The residual stream begins: rows of `embedding` [vocab, size] for int64 tokens."""
    if PDL:
        pdl_wait()
    piece, first = tl.program_id(0), tl.program_id(1) * given.ROWS
    row, tile = some_tiles(first, piece * given.TILES, given.ROWS, given.TILES)
    column = columns_of(tile, given.into)
    inside = (row[:, None] < rows) & (column < given.size)
    token = tl.load(tokens + row, mask=row < rows, other=0)
    x = tl.load(embedding + token[:, None] * given.size + column, mask=inside, other=0.0)
    tl.store(given.stream + row[:, None] * given.size + column, x, mask=inside)
    _weigh(x, first, row, tile, column, inside, piece, rows, given)


@dataclass(frozen=True)
class Norm:
    """The RMSNorm before a product."""

    gain: Tensor
    eps: float
    product: TritonMatmul


def leaving(
    stream: Tensor, norm: Norm | None, tile: Tile, into_tile: Tile | None = None
) -> tuple[Normed, int, Activation | None]:
    """What a kernel is given that changes the stream, the columns of a piece, and the operand that it makes.

    tile: of the program that does it; into_tile: of the product that follows, if not that for all rows of the stream.
    """
    (rows, size), block = stream.shape, tile.block_n
    if norm is None:
        at_once = constexpr(tile.rows_at_once(rows, block))
        plain = Operand(None, None, -(-size // block), 0, constexpr(block), constexpr(False))
        return Normed(stream, size, None, None, plain, at_once, constexpr(1)), block, None
    into = norm.product.activation(rows, into_tile)
    span = max(block, into.tile_k)
    pieces = -(-size // span)
    sums = torch.empty((pieces, into.sums.shape[1]), dtype=torch.float32, device=stream.device)
    into = replace(into, rms=RmsScale(sums, pieces, size, norm.eps, constexpr(triton.next_power_of_2(pieces))))
    at_once = constexpr(tile.rows_at_once(rows, span))
    given = Normed(stream, size, norm.gain, sums, into.operand(), at_once, constexpr(span // into.tile_k))
    return given, span, into


def embed(tokens: Tensor, embedding: Tensor, norm: Norm) -> tuple[Tensor, Activation]:
    """The residual stream [rows, size] of tokens int64 [rows], and its norm as an operand."""
    check_contiguous(tokens, embedding, norm.gain)
    stream = embedding.new_empty((len(tokens), embedding.shape[1]))
    tile = replace(norm.product.tile(len(tokens)), block_n=128, warps=4)
    given, span, into = leaving(stream, norm, tile)
    assert into is not None
    pdl = norm.product.chip.pdl
    grid = (-(-stream.shape[1] // span), -(-len(tokens) // given.ROWS.value))
    embed_kernel[grid](tokens, embedding, len(tokens), given, PDL=pdl, launch_pdl=pdl, num_warps=tile.warps)
    return stream, into


def add(
    x: Activation,
    product: TritonMatmul,
    stream: Tensor,
    norm: Norm | None,
    counters: Tensor,
    tile: Tile | None = None,
) -> Activation | None:
    """Adds the product to the residual stream [rows, size], in place; returns its norm as an operand.

    Without a norm, there is none. tile: of the product that takes it, if not that for all rows.
    counters: int32 zeros, for each block of rows more than pieces of 128 rows of the weight; zeros afterwards.
    """
    check_contiguous(stream, None if norm is None else norm.gain)
    given, span, into = leaving(stream, norm, x.tile, tile)
    product.partial(x, epilogue=Epilogue(add_epilogue, counters, given, constexpr(span), constexpr(1)))
    return into
