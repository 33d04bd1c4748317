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
from mycli.runtime.kernels.triton.product.matmul import Activation, FewRowsProduct, check_contiguous
from mycli.runtime.kernels.triton.product.tiles import Tile
from mycli.runtime.kernels.triton.product_sum import sum_parts
from mycli.runtime.kernels.triton.split_k import Epilogue, add_parts

# A program has only a piece of a row, so RMSNorm is split: the operand is the stream times the gain, stored with the
# sum of squares of each piece; the product that reads it divides by the root of their mean (`RmsScale`). A launch for
# the norm alone would read and write the stream once more.


class ResidualArguments(NamedTuple):
    """The stream that a kernel writes and, if `into` has data, the operand of the next product."""

    stream: Any  # [rows, size]
    size: Any
    gain: Any  # [size], or None without a norm
    squares: Any  # fp32 [pieces, padded rows], or None without a norm
    into: Any  # `Operand`
    ROWS: Any  # rows at a time
    TILES: Any  # tiles of a piece
    bias: Any = None  # [size], of the product that is added
    scale: Any = None  # multiplies what is added, or the embedding
    scalar: Any = None  # [1]: multiplies the sum


@triton.jit
def _store_normed(x, gain, first, row, tile, inside, piece, rows, args):
    wide = x.to(tl.float32)  # [tiles, TILE_K]; first: of ROWS rows
    if args.gain is not None:
        squares = tl.sum(tl.sum(wide * wide, axis=1).reshape(args.ROWS, args.TILES), axis=1)
        first_row = first + tl.arange(0, args.ROWS)
        tl.store(args.squares + piece * args.into.rows_padded + first_row, squares, mask=first_row < rows)
        wide = wide * gain.to(tl.float32)
    store_activation(wide, row, tile, (row < rows) & (tile < args.into.tiles), args.into)


@triton.jit
def load_gain(column, inside, args):
    """Return the gain of the next norm [tiles, TILE_K], None without one; before what waits for other programs."""
    # Not to be assigned in one statement with another value: Triton 3.6 has no None in a tuple.
    gain = None
    if args.gain is not None:
        gain = tl.load(args.gain + column, mask=inside, other=0.0)
    return gain


@triton.jit
def store_sum(x, added, gain, first, row, tile, column, inside, piece, rows, args):
    """Add fp32 `added` to the residual stream x [tiles, TILE_K]; store it, and the operand of the next product."""
    added = added.to(x.dtype).to(tl.float32)
    if args.scale is not None:
        added = (added * args.scale).to(x.dtype).to(tl.float32)
    x = (x.to(tl.float32) + added).to(x.dtype)
    if args.scalar is not None:
        x = (x.to(tl.float32) * tl.load(args.scalar).to(tl.float32)).to(x.dtype)
    tl.store(args.stream + row[:, None] * args.size + column, x, mask=inside)
    if args.into.data is not None:
        _store_normed(x, gain, first, row, tile, inside, piece, rows, args)


@triton.jit
def add_epilogue(parts, count, piece, first, rows, args):
    """Add the product to the residual stream."""
    row, tile = some_tiles(first, piece * args.TILES, args.ROWS, args.TILES)
    column = columns_of(tile, args.into)
    inside = (row[:, None] < rows) & (column < args.size)
    place = row[:, None] * args.size + column
    # 113 MB of an 8B model's weights pass the L2 cache between uses of the gain, so it is a miss: not behind the sums.
    x = tl.load(args.stream + place, mask=inside, other=0.0)
    gain = load_gain(column, inside, args)
    added = add_parts(parts, place, count, rows * args.size, inside)
    if args.bias is not None:
        bias = tl.load(args.bias + column, mask=inside, other=0.0).to(tl.float32)
        added = added.to(x.dtype).to(tl.float32) + bias
    store_sum(x, added, gain, first, row, tile, column, inside, piece, rows, args)


@triton.jit(do_not_specialize=["pieces", "rows", "rows_padded"])
def norm_add_kernel(
    y,  # [rows, size]
    squares,  # fp32 [pieces, rows_padded]: sums of squares of each piece of a row of y
    gain,  # [size]
    pieces,
    rows,
    rows_padded,
    eps,
    args,
    PIECES: tl.constexpr,  # a power of two, at least `pieces`
    PDL: tl.constexpr,
):
    """Grid (pieces of the stream, rows): add the norm of y to the residual stream."""
    if PDL:
        pdl_wait()
    piece, first = tl.program_id(0), tl.program_id(1)
    row, tile = some_tiles(first, piece * args.TILES, args.ROWS, args.TILES)
    column = columns_of(tile, args.into)
    inside = (row[:, None] < rows) & (column < args.size)
    place = row[:, None] * args.size + column
    which = tl.arange(0, PIECES)
    total = tl.sum(tl.load(squares + which * rows_padded + first, mask=which < pieces, other=0.0), 0)
    x = tl.load(args.stream + place, mask=inside, other=0.0)
    next_gain = load_gain(column, inside, args)
    y_gain = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    added = value * tl.rsqrt(total / args.size + eps) * y_gain
    store_sum(x, added, next_gain, first, row, tile, column, inside, piece, rows, args)


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
    if args.scale is not None:
        x = (x.to(tl.float32) * args.scale).to(x.dtype)
    tl.store(args.stream + row[:, None] * args.size + column, x, mask=inside)
    _store_normed(x, load_gain(column, inside, args), first, row, tile, inside, piece, rows, args)


@dataclass(frozen=True)
class Norm:
    """The RMSNorm before `product`; without a gain the product reads the stream as it is."""

    gain: Tensor | None
    eps: float
    product: FewRowsProduct


@dataclass(frozen=True)
class Residual:
    """The bias, RMSNorm and factor between a product and the stream; `scalar` [1] multiplies the sum of both."""

    bias: Tensor | None = None
    gain: Tensor | None = None
    eps: float = 0.0
    scale: float = 1.0
    scalar: Tensor | None = None


PLAIN_SUM = Residual()


def residual_arguments(
    stream: Tensor, norm: Norm | None, tile: Tile, into_tile: Tile | None = None, residual: Residual = PLAIN_SUM
) -> tuple[ResidualArguments, int, Activation | None]:
    """Return the kernel arguments to write the stream, the columns of a piece, and the operand for `norm.product`.

    tile: of the program that writes. into_tile: of the next product, if not its tile for all rows of the stream.
    """
    (rows, size), block = stream.shape, tile.block_n
    extra = residual.bias, None if residual.scale == 1.0 else residual.scale, residual.scalar
    if norm is None:
        at_once = constexpr(tile.rows_at_once(rows))
        plain = Operand(None, None, -(-size // block), 0, constexpr(block), constexpr(False))
        return ResidualArguments(stream, size, None, None, plain, at_once, constexpr(1), *extra), block, None
    into = norm.product.activation(rows, into_tile)
    span, sums = max(block, into.tile_k), None
    pieces = -(-size // span)
    if norm.gain is not None:
        sums = torch.empty((pieces, into.sums.shape[1]), dtype=torch.float32, device=stream.device)
        into = replace(into, rms=RmsScale(sums, pieces, size, norm.eps, constexpr(triton.next_power_of_2(pieces))))
    at_once, tiles = constexpr(tile.rows_at_once(rows)), constexpr(span // into.tile_k)
    args = ResidualArguments(stream, size, norm.gain, sums, into.operand(), at_once, tiles, *extra)
    return args, span, into


def embed(tokens: Tensor, embedding: Tensor, norm: Norm, scale: float = 1.0) -> tuple[Tensor, Activation]:
    """Return the residual stream [rows, size] of tokens int64 [rows], times `scale`, and its norm as an operand."""
    check_contiguous(tokens, embedding, norm.gain)
    stream = embedding.new_empty((len(tokens), embedding.shape[1]))
    tile = replace(norm.product.tile(len(tokens)), block_n=128, warps=4)
    args, span, into = residual_arguments(stream, norm, tile, residual=Residual(scale=scale))
    assert into is not None
    pdl = norm.product.chip.pdl
    grid = (-(-stream.shape[1] // span), -(-len(tokens) // args.ROWS.value))
    embed_kernel[grid](tokens, embedding, len(tokens), args, PDL=pdl, launch_pdl=pdl, num_warps=tile.warps)
    return stream, into


def add(
    x: Activation,
    product: FewRowsProduct,
    stream: Tensor,
    norm: Norm | None,
    counters: Tensor,
    tile: Tile | None = None,
    residual: Residual = PLAIN_SUM,
) -> Activation | None:
    """Add the product to the residual stream [rows, size] in place; return its norm as an operand, None without a norm.

    tile: of the product that reads the operand, if not its tile for all rows. counters: int32 zeros, one per block of
    rows and 128 rows of the weight; zeros afterwards.
    """
    check_contiguous(stream, None if norm is None else norm.gain, residual.bias, residual.gain)
    if residual.gain is not None:
        return _add_normed(x, product, stream, norm, counters, tile, residual, residual.gain)
    args, span, into = residual_arguments(stream, norm, x.tile, tile, residual)
    epilogue = Epilogue(add_epilogue, counters, args, constexpr(span), constexpr(1))
    product.partial(x, epilogue=epilogue, next_first=True)
    return into


def _add_normed(
    x: Activation,
    product: FewRowsProduct,
    stream: Tensor,
    norm: Norm | None,
    counters: Tensor,
    tile: Tile | None,
    residual: Residual,
    gain: Tensor,
) -> Activation | None:
    # A norm of the product needs whole rows, which no program of the product sees. The product is therefore stored with
    # sums of squares, and a second launch adds its norm to the stream.
    y, squares = sum_parts(x, product, stream.dtype, max(128, x.tile.block_n), counters, residual.bias)
    writer = replace(x.tile, block_m=1, block_n=128, warps=4)
    args, span, into = residual_arguments(stream, norm, writer, tile, replace(residual, bias=None))
    rows, pdl = len(stream), product.chip.pdl
    norm_add_kernel[(-(-stream.shape[1] // span), rows)](
        *(y, squares, gain, len(squares), rows, squares.shape[1], residual.eps, args),
        PIECES=triton.next_power_of_2(len(squares)),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=writer.warps,
    )
    return into
