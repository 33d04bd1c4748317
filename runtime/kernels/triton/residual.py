"""The residual stream: embedding, additions, and the normed operand of the next product."""

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

# A program has a piece of a row, so RMSNorm is split: the operand is the stream times the gain, stored with the sum
# of squares of each piece; the product that reads it divides by the root of their mean (`RmsScale`).


class ResidualArguments(NamedTuple):
    """Where a kernel writes the stream and, if `gain` is not None, the operand of the next product."""

    stream: Any  # [rows, size]
    size: Any
    gain: Any  # [size]
    squares: Any  # fp32 [pieces, padded rows]
    into: Any  # `Operand`
    ROWS: Any  # rows at a time
    TILES: Any  # tiles of a piece


@triton.jit
def _store_normed(x, gain, first, row, tile, inside, piece, rows, args):
    wide = x.to(tl.float32)  # [tiles, TILE_K]; first: of ROWS rows
    squares = tl.sum(tl.sum(wide * wide, axis=1).reshape(args.ROWS, args.TILES), axis=1)
    first_row = first + tl.arange(0, args.ROWS)
    tl.store(args.squares + piece * args.into.rows_padded + first_row, squares, mask=first_row < rows)
    store_activation(wide * gain.to(tl.float32), row, tile, (row < rows) & (tile < args.into.tiles), args.into)


@triton.jit
def load_gain(column, inside, args):
    """Return the gain of the next norm [tiles, TILE_K], None without one; before what waits for other programs."""
    gain = None
    if args.gain is not None:
        gain = tl.load(args.gain + column, mask=inside, other=0.0)
    return gain


@triton.jit
def store_sum(x, added, gain, first, row, tile, column, inside, piece, rows, args):
    """Add fp32 `added` to the residual stream x [tiles, TILE_K]; store it, and the operand of the next product."""
    x = (x.to(tl.float32) + added.to(x.dtype).to(tl.float32)).to(x.dtype)
    tl.store(args.stream + row[:, None] * args.size + column, x, mask=inside)
    if args.gain is not None:
        _store_normed(x, gain, first, row, tile, inside, piece, rows, args)


@triton.jit
def add_epilogue(parts, count, piece, first, rows, args):
    """Add the product to the residual stream."""
    row, tile = some_tiles(first, piece * args.TILES, args.ROWS, args.TILES)
    column = columns_of(tile, args.into)
    inside = (row[:, None] < rows) & (column < args.size)
    place = row[:, None] * args.size + column
    # 113 MB of an 8B model's weights pass the L2 cache between uses of the gain, so it is a miss: not behind the sums.
    x, gain = tl.load(args.stream + place, mask=inside, other=0.0), load_gain(column, inside, args)
    added = add_parts(parts, place, count, rows * args.size, inside)
    store_sum(x, added, gain, first, row, tile, column, inside, piece, rows, args)


@triton.jit
def embed_kernel(tokens, embedding, rows, args, PDL: tl.constexpr):
    """Grid (pieces, blocks of ROWS): begin the residual stream with rows of `embedding` [vocab, size], int64 tokens."""
    if PDL:
        pdl_wait()
    piece, first = tl.program_id(0), tl.program_id(1) * args.ROWS
    row, tile = some_tiles(first, piece * args.TILES, args.ROWS, args.TILES)
    column = columns_of(tile, args.into)
    inside = (row[:, None] < rows) & (column < args.size)
    token = tl.load(tokens + row, mask=row < rows, other=0)
    x = tl.load(embedding + token[:, None] * args.size + column, mask=inside, other=0.0)
    tl.store(args.stream + row[:, None] * args.size + column, x, mask=inside)
    _store_normed(x, load_gain(column, inside, args), first, row, tile, inside, piece, rows, args)


@dataclass(frozen=True)
class Norm:
    """The RMSNorm before `product`."""

    gain: Tensor
    eps: float
    product: TritonMatmul


def residual_arguments(
    stream: Tensor, norm: Norm | None, tile: Tile, into_tile: Tile | None = None
) -> tuple[ResidualArguments, int, Activation | None]:
    """Return the kernel arguments to write the stream, the columns of a piece, and the operand for `norm.product`.

    tile: of the program that writes. into_tile: of the next product, if not its tile for all rows of the stream.
    """
    (rows, size), block = stream.shape, tile.block_n
    if norm is None:
        at_once = constexpr(tile.rows_at_once(rows, block))
        plain = Operand(None, None, -(-size // block), 0, constexpr(block), constexpr(False))
        return ResidualArguments(stream, size, None, None, plain, at_once, constexpr(1)), block, None
    into = norm.product.activation(rows, into_tile)
    span = max(block, into.tile_k)
    pieces = -(-size // span)
    sums = torch.empty((pieces, into.sums.shape[1]), dtype=torch.float32, device=stream.device)
    into = replace(into, rms=RmsScale(sums, pieces, size, norm.eps, constexpr(triton.next_power_of_2(pieces))))
    at_once = constexpr(tile.rows_at_once(rows, span))
    args = ResidualArguments(stream, size, norm.gain, sums, into.operand(), at_once, constexpr(span // into.tile_k))
    return args, span, into


def embed(tokens: Tensor, embedding: Tensor, norm: Norm) -> tuple[Tensor, Activation]:
    """Return the residual stream [rows, size] of tokens int64 [rows], and its norm as an operand."""
    check_contiguous(tokens, embedding, norm.gain)
    stream = embedding.new_empty((len(tokens), embedding.shape[1]))
    tile = replace(norm.product.tile(len(tokens)), block_n=128, warps=4)
    args, span, into = residual_arguments(stream, norm, tile)
    assert into is not None
    pdl = norm.product.chip.pdl
    grid = (-(-stream.shape[1] // span), -(-len(tokens) // args.ROWS.value))
    embed_kernel[grid](tokens, embedding, len(tokens), args, PDL=pdl, launch_pdl=pdl, num_warps=tile.warps)
    return stream, into


def add(
    x: Activation,
    product: TritonMatmul,
    stream: Tensor,
    norm: Norm | None,
    counters: Tensor,
    tile: Tile | None = None,
) -> Activation | None:
    """Add the product to the residual stream [rows, size] in place; return its norm as an operand, None without a norm.

    tile: of the product that reads the operand, if not its tile for all rows. counters: int32 zeros, one per block of
    rows and 128 rows of the weight; zeros afterwards.
    """
    check_contiguous(stream, None if norm is None else norm.gain)
    args, span, into = residual_arguments(stream, norm, x.tile, tile)
    product.partial(x, epilogue=Epilogue(add_epilogue, counters, args, constexpr(span), constexpr(1)))
    return into
