"""The activation operand of packed products, as Triton device code; every kernel that feeds a product uses it."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from typing import Any, NamedTuple

import triton
import triton.language as tl

# fp16 [rows, tiles * TILE_K], scaled by a power of two per row and tile so that bf16 fits exactly, with that power
# and the sum of each row and tile.


class Operand(NamedTuple):
    """Where the operand of a product is written, as kernel arguments."""

    data: Any  # fp16 [rows, tiles * TILE_K]; without `sums` of any dtype, and the values as they are
    sums: Any  # fp32 [tiles, rows_padded, 2]: the power of two, and the sum before scaling; None for plain values
    tiles: Any
    rows_padded: Any
    TILE_K: Any
    PERMUTED: Any  # columns are stored in MMA order


@triton.jit
def natural_column(place, TILE_K: tl.constexpr, PERMUTED: tl.constexpr):
    """Return the column of a row that is stored at `place`: the MMA order permutes bits of the place."""
    if PERMUTED and TILE_K == 16:  # (k half, lane % 4, even or odd) in place of (lane % 4, k half, even or odd)
        return place // 16 * 16 + place // 2 % 4 * 4 + place // 8 % 2 * 2 + place % 2
    elif PERMUTED:  # (pair of pairs, k half, lane % 4, even or odd) in place of (lane % 4, pair of pairs, k half, ..)
        return place // 32 * 32 + place // 2 % 4 * 8 + place // 16 % 2 * 4 + place // 8 % 2 * 2 + place % 2
    else:
        return place


@triton.jit
def some_tiles(row, tile, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Return (row, tile), int32 [ROWS * TILES] each: TILES tiles from `tile` of ROWS rows from `row`."""
    index = tl.arange(0, ROWS * TILES)
    return row + index // TILES, tile + index % TILES


@triton.jit
def columns_of(tile, into):
    """Return the columns of a row in `tile`s, in the order of `into.data`: [tiles, TILE_K]."""
    place = tl.arange(0, into.TILE_K)
    return tile[:, None] * into.TILE_K + natural_column(place, into.TILE_K, into.PERMUTED)[None, :]


@triton.jit
def _cut(value, PARTS: tl.constexpr):
    return value.reshape(value.shape[0], PARTS, value.shape[1] // PARTS)


@triton.jit
def scaled_rows(value, PARTS: tl.constexpr = 1):
    """Return rows fp32 as fp16, scaled by a power of two each, and its inverse. PARTS: as in `store_activation`."""
    largest = tl.abs(value)
    if PARTS > 1:
        largest = tl.max(_cut(largest, PARTS), axis=2)
    # Scaled to below 2^15, fp16 holds every bf16 or fp16 value above 2^-38 of the row's largest exactly.
    exponent = tl.maximum(tl.max(largest, axis=1).to(tl.int32, bitcast=True) >> 23, 20)
    down = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^(14 - e)
    up = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return (value * down[:, None]).to(tl.float16), up


@triton.jit
def _store_scaled(value, place, row, tile, present, into, PARTS: tl.constexpr):
    scaled, up = scaled_rows(value, PARTS)
    tl.store(into.data + place, scaled, mask=present[:, None])
    pair = into.sums + (tile * into.rows_padded + row) * 2
    tl.store(pair, up, mask=present)
    terms = scaled.to(tl.float32)
    if PARTS > 1:
        terms = tl.sum(_cut(terms, PARTS), axis=2)
    tl.store(pair + 1, tl.sum(terms, axis=1) * up, mask=present)


@triton.jit
def store_activation(value, row, tile, present, into, PARTS: tl.constexpr = 1):
    """Store value fp32 [tiles, TILE_K], columns as in `columns_of`, where `present` [tiles].

    PARTS: pieces of a row that were rows before a `reshape`. Each is reduced first: Triton 3.6 takes the lanes of a row
    for neighbours and would add those of other rows.
    """
    place = (row * into.tiles + tile)[:, None] * into.TILE_K + tl.arange(0, into.TILE_K)[None, :]
    if into.sums is None:
        tl.store(into.data + place, value.to(into.data.dtype.element_ty), mask=present[:, None])
    else:
        _store_scaled(value, place, row, tile, present, into, PARTS)


@triton.jit
def prepare_kernel(
    x,  # [rows, k], rows x_stride apart
    into,
    k,
    x_stride,
    TILES: tl.constexpr,
):
    """Grid (rows, blocks of TILES tiles): write an operand from x."""
    row = tl.program_id(0)
    _, tile = some_tiles(row, tl.program_id(1) * TILES, 1, TILES)
    column = columns_of(tile, into)
    value = tl.load(x + row.to(tl.int64) * x_stride + column, mask=column < k, other=0.0).to(tl.float32)
    store_activation(value, row, tile, tile < into.tiles, into)
