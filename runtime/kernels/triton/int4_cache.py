"""Vectors of 4-bit codes in the KV cache as Triton device code, bit for bit as `runtime.cache.int4`."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl

from mycli.runtime.kernels.triton.cache_codes import convert_int4, convert_int4_words

# Writing: a Hadamard rotation, then rounding in groups of 32. Reading: still rotated, as two halves, since each byte
# has a code of either; the other operand is rotated too, and weighted sums are rotated back. Head sizes are 64, 128
# and 256.

_GROUP = tl.constexpr(32)
_UNIT = tl.constexpr(16)  # dimensions whose codes fill 8 bytes
_MAX_STEPS = tl.constexpr(8)  # for a head of 256
_SMALLEST = tl.constexpr(2.0**-126)  # smaller scales are stored as 0


@triton.jit
def round_whole(x):
    """Round to the nearest integer, halves to even, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def hadamard_rows(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return the unnormalized Hadamard transform of the rows of x fp32 [ROWS, SIZE], neighbours first."""
    for bit in tl.static_range(_MAX_STEPS):
        if (2 << bit) <= SIZE:
            pairs = x.reshape(ROWS, SIZE >> (bit + 1), 2, 1 << bit).permute(0, 1, 3, 2)
            first, second = tl.split(pairs)
            x = tl.join(first + second, first - second).permute(0, 1, 3, 2).reshape(ROWS, SIZE)
    return x


@triton.jit
def lower_and_upper(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Split x [ROWS, SIZE] into the columns stored in the lower and upper halves of bytes, [ROWS, SIZE / 2] each."""
    lower, upper = tl.split(x.reshape(ROWS, SIZE // _UNIT, 2, _UNIT // 2).permute(0, 1, 3, 2))
    return lower.reshape(ROWS, SIZE // 2), upper.reshape(ROWS, SIZE // 2)


@triton.jit
def whole_rows(lower, upper, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Invert `lower_and_upper`: [ROWS, SIZE]."""
    units: tl.constexpr = (ROWS, SIZE // _UNIT, _UNIT // 2)
    both = tl.join(lower.reshape(units), upper.reshape(units))
    return both.permute(0, 1, 3, 2).reshape(ROWS, SIZE)


@triton.jit
def store_int4(x, codes, scales, first, second, known, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Quantize and store rotated rows x fp32 [ROWS, SIZE], whole groups of vectors, where `known`.

    first, second: int64 [ROWS], offsets of the first byte of codes and the first scale of each row.
    """
    groups = x.reshape(ROWS, SIZE // _GROUP, _GROUP)
    low, high = tl.min(groups, axis=2), tl.max(groups, axis=2)
    extreme = tl.where(high > -low, high, low)
    wrong = tl.sum(groups * 0.0, axis=2)  # NaN where a value is not finite, else 0
    bits = (extreme * -0.125).to(tl.int32, bitcast=True)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)  # round to bf16, halves to even, independent of how `to` rounds
    step = (bits & -65536).to(tl.float32, bitcast=True)
    tiny = tl.abs(step) < _SMALLEST
    code = round_whole(tl.div_rn(groups, tl.where(tiny, float("inf"), step)[:, :, None]))
    code = tl.where((wrong == 0.0)[:, :, None], code, 0.0)
    code = tl.minimum(tl.maximum(code, -8.0), 7.0).to(tl.int32).reshape(ROWS, SIZE) & 15
    lower, upper = lower_and_upper(code, ROWS, SIZE)
    byte, group = tl.arange(0, SIZE // 2), tl.arange(0, SIZE // _GROUP)
    tl.store(codes + first[:, None] + byte[None, :], (lower | (upper << 4)).to(tl.uint8), mask=known[:, None])
    stored = tl.where(wrong == 0.0, tl.where(tiny, 0, bits >> 16), 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(scales + second[:, None] + group[None, :], stored, mask=known[:, None])


@triton.jit
def load_int4(
    codes,
    scales,
    place,
    vector,
    present,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
    WORDS: tl.constexpr,  # load words of four bytes: for operands that pass through shared memory once converted
    PURE: tl.constexpr = False,  # as `convert_int4_words`
):
    """Load ROWS rotated vectors, as lower and upper columns, each DOT [ROWS, HEAD_DIM / 2].

    place: byte of the first code; vector: index of the first vector among those that `scales` has, in the same order.
    Rows that are not `present` [ROWS] are zeros.
    """
    BYTES: tl.constexpr = HEAD_DIM // 2
    GROUPS: tl.constexpr = HEAD_DIM // _GROUP
    row, group = tl.arange(0, ROWS)[:, None], tl.arange(0, GROUPS)[None, :]
    if WORDS:
        word = tl.arange(0, HEAD_DIM // 8)[None, :]
        # Two words a thread: what it stores once they are converted, 16 bytes of either half, meets in no bank.
        source = codes.to(tl.pointer_type(tl.int32)) + tl.max_contiguous(place // 4 + row * (BYTES // 4) + word, [1, 2])
        packed = tl.load(source, mask=present[:, None], other=0)
        lower, upper = convert_int4_words(packed, ROWS, HEAD_DIM // 8, DOT, ASM, PURE)
    else:
        byte = tl.arange(0, BYTES)[None, :]
        packed = tl.load(codes + place + row * BYTES + byte, mask=present[:, None], other=0)
        lower, upper = convert_int4(packed, DOT, ASM)
    at = scales + vector * GROUPS + row * GROUPS + group
    scale = tl.load(at, mask=present[:, None], other=0.0).to(DOT)
    scale = tl.broadcast_to(scale[:, :, None], (ROWS, GROUPS, _GROUP // 2)).reshape(ROWS, HEAD_DIM // 2)
    return lower * scale, upper * scale
