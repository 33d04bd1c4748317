"""Which rows of a weight a tile has, and what its numbers are to be multiplied by, as Triton device code.

16-bit scales come in pairs, those of the two rows of an MMA register pair, in the order that `product.weight_layout`
keeps them in. Knows neither where codes lie nor activations.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl


@triton.jit
def tile_blocks(block, BLOCK_N: tl.constexpr, REPEATS: tl.constexpr, WARPS: tl.constexpr):
    """Which 16 rows of the matrix each 16 rows of a tile are: a warp's rows are those of whole chunks."""
    place = tl.arange(0, BLOCK_N // 16)  # (chunk, repeat, warp): MMA tiles go to warps in turn
    turn = place // (WARPS * REPEATS) * WARPS + place % WARPS
    return block * (BLOCK_N // 16) + turn * REPEATS + place // WARPS % REPEATS


@triton.jit
def row_terms(
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    REPEATS: tl.constexpr,
    WARPS: tl.constexpr,
    CODES: tl.constexpr,
    UNIT: tl.constexpr,
):
    """(factor, bias): what is to be taken off the numbers that unpacking gives, fp32 [BLOCK_N] or one for all rows."""
    if CODES == "int":
        step = _row_steps(BITS, BLOCK_N, REPEATS, WARPS).to(tl.float32)
        factor, bias = 1.0 / step, 1024.0 + step * (1 << (BITS - 1))
    else:
        factor, bias = tl.full((BLOCK_N,), UNIT, tl.float32), tl.zeros((BLOCK_N,), tl.float32)
    return factor, bias


@triton.jit
def _row_steps(BITS: tl.constexpr, BLOCK_N: tl.constexpr, REPEATS: tl.constexpr, WARPS: tl.constexpr):
    """By what power of two the codes of each row of a tile come out."""
    FIELD_ROWS: tl.constexpr = 2 if BITS >= 4 else (8 if BITS == 3 else 4)
    row = tl.arange(0, BLOCK_N)
    field = row // 16 // WARPS % REPEATS % (FIELD_ROWS // 2) * 2 + row // 8 % 2
    if BITS == 8:
        return tl.full((BLOCK_N,), 1, tl.int32)
    elif BITS == 3:
        return 1 << (field // 3 * 3)
    else:
        return 1 << (field * BITS)


@triton.jit
def load_scales(scales, tile, n_kept, blocks, BLOCK_N: tl.constexpr, SCALE: tl.constexpr):
    """The raw words of a group's scales: int32 [BLOCK_N / 2], two 16-bit scales each, or fp32 [BLOCK_N]."""
    if SCALE == "fp32":
        rows = (blocks[:, None] * 16 + tl.arange(0, 16)[None, :]).reshape(BLOCK_N)
        words = tl.load(scales + tile * n_kept + rows)
    else:
        pairs = (blocks[:, None] * 8 + tl.arange(0, 8)[None, :]).reshape(BLOCK_N // 2)
        words = tl.load(scales + tile * (n_kept // 2) + pairs)
    return words


@triton.jit
def to_scales(words, BLOCK_N: tl.constexpr, SCALE: tl.constexpr):
    """fp32 [BLOCK_N] from what `load_scales` returned."""
    if SCALE == "fp32":
        result = words
    else:
        if SCALE == "bf16":  # the upper half of an fp32
            low, high = (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
        else:
            low = (words & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        result = tl.join(low, high).reshape(BLOCK_N // 16, 8, 2).permute(0, 2, 1).reshape(BLOCK_N)
    return result


@triton.jit
def scale_words(scales, tile, end, n_kept, blocks, UNROLL: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr):
    """The scale words of the next UNROLL tiles; past the end, those of the last."""
    words: tl.tuple = ()
    for step in tl.static_range(UNROLL):
        words = words + (load_scales(scales, tl.minimum(tile + step, end - 1), n_kept, blocks, BLOCK_N, SCALE),)
    return words
