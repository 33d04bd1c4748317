"""Row numbers and scales of a weight tile, as Triton device code."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl

# 16-bit scales come in pairs, for the two rows of an MMA register pair, in the order of `product.weight_layout`.


@triton.jit
def tile_blocks(block, BLOCK_N: tl.constexpr, REPEATS: tl.constexpr, WARPS: tl.constexpr):
    """Return the index in the matrix of each 16 rows of a tile: a warp has the rows of whole chunks."""
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
    ZERO: tl.constexpr,
):
    """Return (factor, bias) to remove from unpacked codes, fp32 [BLOCK_N]."""
    if CODES == "int":
        step = _row_steps(BITS, BLOCK_N, REPEATS, WARPS).to(tl.float32)
        factor, bias = UNIT / step, 1024.0 + step * ZERO
    else:
        BIAS: tl.constexpr = 0.0 if ZERO is None else 1024.0 + ZERO
        factor, bias = tl.full((BLOCK_N,), UNIT, tl.float32), tl.full((BLOCK_N,), BIAS, tl.float32)
    return factor, bias


@triton.jit
def _row_steps(BITS: tl.constexpr, BLOCK_N: tl.constexpr, REPEATS: tl.constexpr, WARPS: tl.constexpr):
    """Return the power of two by which the codes of each row are unpacked."""
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
def load_scales(scales, tile, n_padded, blocks, BLOCK_N: tl.constexpr, SCALE: tl.constexpr):
    """Load the raw scales of a group: int32 [BLOCK_N / 2] of two 16-bit scales each, or fp32 [BLOCK_N]."""
    if SCALE == "fp32":
        rows = (blocks[:, None] * 16 + tl.arange(0, 16)[None, :]).reshape(BLOCK_N)
        words = tl.load(scales + tile * n_padded + rows)
    else:
        pairs = (blocks[:, None] * 8 + tl.arange(0, 8)[None, :]).reshape(BLOCK_N // 2)
        words = tl.load(scales + (tile * (n_padded // 2) + pairs))
    return words


@triton.jit
def to_scales(words, BLOCK_N: tl.constexpr, SCALE: tl.constexpr):
    """Convert the words of `load_scales` to fp32 [BLOCK_N]."""
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
def scale_word(scales, tile, end, n_padded, blocks, BLOCK_N: tl.constexpr, SCALE: tl.constexpr):
    """Load the scale words of a tile; past the end, those of the last."""
    return load_scales(scales, tl.minimum(tile, end - 1), n_padded, blocks, BLOCK_N, SCALE)
