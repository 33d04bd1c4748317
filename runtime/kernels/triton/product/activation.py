"""The operand of the packed product, as Triton device code: who makes activations writes them with this.

Activations are fp16 [rows, tiles * TILE_K], scaled by a power of two per row and tile so that bf16 fits exactly; with
them go that power and their sum. Knows no tensors; `product.matmul` launches `prepare_kernel`.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Operand(NamedTuple):
    """Where the operand of a product is written, as the kernels take it; the last two are constants."""

    data: Any  # fp16 [rows, tiles * TILE_K]
    sums: Any  # fp32 [tiles, rows_kept, 2]: the power of two taken out, and the sum as it was
    tiles: Any
    rows_kept: Any
    TILE_K: Any
    PERMUTED: Any  # columns lie in the order of the MMA


@triton.jit
def natural_column(place, TILE_K: tl.constexpr, PERMUTED: tl.constexpr):
    """Which column of a row lies at a place of `values`: the MMA's order permutes bits of the place."""
    if PERMUTED and TILE_K == 16:  # (k half, lane % 4, even or odd) in place of (lane % 4, k half, even or odd)
        return place // 16 * 16 + place // 2 % 4 * 4 + place // 8 % 2 * 2 + place % 2
    elif PERMUTED:  # (k half, lane % 4, pair of pairs, even or odd) in place of (lane % 4, pair of pairs, k half, ..)
        return place // 32 * 32 + place // 4 % 4 * 8 + place // 2 % 2 * 4 + place // 16 % 2 * 2 + place % 2
    else:
        return place


@triton.jit
def some_tiles(row, tile, ROWS: tl.constexpr, TILES: tl.constexpr):
    """(row, tile), int32 [ROWS * TILES] each: TILES tiles from `tile` of ROWS rows from `row`."""
    index = tl.arange(0, ROWS * TILES)
    return row + index // TILES, tile + index % TILES


@triton.jit
def columns_of(tile, into):
    """Which columns of a row lie in tiles [tiles at hand], in the order of `into.data`: [tiles at hand, TILE_K]."""
    place = tl.arange(0, into.TILE_K)
    return tile[:, None] * into.TILE_K + natural_column(place, into.TILE_K, into.PERMUTED)[None, :]


@triton.jit
def store_activation(value, row, tile, present, into):
    """Write value fp32 [tiles at hand, TILE_K], columns as `columns_of` says, where `present` [tiles at hand].

    Each tile is scaled by a power of two to below 2^15: fp16 then holds every bf16 or fp16 number larger than 2^-38 of
    the largest of its tile exactly.
    """
    exponent = tl.maximum(tl.max(tl.abs(value), axis=1).to(tl.int32, bitcast=True) >> 23, 20)
    down = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^(14 - e)
    up = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    scaled = (value * down[:, None]).to(tl.float16)
    place = (row * into.tiles + tile)[:, None] * into.TILE_K + tl.arange(0, into.TILE_K)[None, :]
    tl.store(into.data + place, scaled, mask=present[:, None])
    pair = into.sums + (tile * into.rows_kept + row) * 2
    tl.store(pair, up, mask=present)
    tl.store(pair + 1, tl.sum(scaled.to(tl.float32), axis=1) * up, mask=present)


@triton.jit
def prepare_kernel(
    x,  # [rows, k], rows x_stride apart
    into,
    k,
    x_stride,
    TILES: tl.constexpr,
):
    """Grid (rows, blocks of TILES tiles)."""
    row = tl.program_id(0)
    _, tile = some_tiles(row, tl.program_id(1) * TILES, 1, TILES)
    column = columns_of(tile, into)
    value = tl.load(x + row.to(tl.int64) * x_stride + column, mask=column < k, other=0.0).to(tl.float32)
    store_activation(value, row, tile, tile < into.tiles, into)
