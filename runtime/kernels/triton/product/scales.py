"""The scales of packed weights as the product reads them, as Triton device code.

16-bit scales come in pairs, those of the two rows of an MMA register pair, in the order that `product.weight_layout`
keeps them in. Knows no codes and no activations.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl


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
