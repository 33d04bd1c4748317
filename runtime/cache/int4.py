"""int4 vectors for the KV cache: a Hadamard rotation, then 4-bit codes in groups of 32 with a bf16 scale each.

Native code computes the same bits (`attention_int4.h`); the layout is in `runtime.quantization.int4_vectors`.
"""

import math

import torch
from torch import Tensor

from mycli.runtime.quantization.int4_vectors import INT4_GROUP, UNIT, int4_groups

_SMALLEST = torch.finfo(torch.float32).tiny  # a scale below it is 0


def hadamard(x: Tensor) -> Tensor:
    """Rotate x [..., size], floating, by a normalized Hadamard transform, which is its own inverse."""
    # A few dimensions of keys are many times larger than the others and would dominate the scale of their group; the
    # rotation spreads them (QuaRot, arXiv 2404.00456). Queries rotated alike give the same products.
    # A size that is no power of two is rotated in blocks: 80 in blocks of 16, 96 in blocks of 32.
    # The order of the sums, neighbours first and in the dtype of x, is that of the native code.
    size = x.shape[-1]
    block = size & -size  # the largest power of two that divides it
    step, y = 1, x
    while step < block:
        first, second = y.reshape(*x.shape[:-1], size // (2 * step), 2, step).unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        step *= 2
    return y * (1 / math.sqrt(block))


def pack_int4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Pack values [..., head_dim] to codes uint8 [..., head_dim / 2] and scales bf16 [..., groups].

    A value that is not finite makes its rotation block NaN. Raises ModelError for heads that are not a multiple of 16.
    """
    *outer, head_dim = values.shape
    groups = int4_groups(head_dim)
    rotated = hadamard(values.float())
    whole = torch.nn.functional.pad(rotated, (0, groups * INT4_GROUP - head_dim))
    padded = whole.view(*outer, groups, INT4_GROUP)
    low, high = padded.amin(-1), padded.amax(-1)
    extreme = torch.where(high > -low, high, low)
    # The extreme gets code -8 whatever its sign, so the scale is signed and all 16 codes are used.
    scales = (extreme * -0.125).bfloat16()
    steps = scales.float()
    finite, tiny = extreme.isfinite(), steps.abs() < _SMALLEST
    scales = scales.masked_fill(tiny, 0).masked_fill(~finite, torch.nan)
    codes = (padded / steps.masked_fill(tiny, torch.inf).unsqueeze(-1)).round_().nan_to_num_(0).clamp_(-8, 7)
    halves = codes.flatten(-2)[..., :head_dim].to(torch.int8).view(torch.uint8) & 15
    lower, upper = halves.reshape(*outer, head_dim // UNIT, 2, UNIT // 2).unbind(-2)
    return (lower | upper << 4).flatten(-2), scales


def unpack_int4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack what `pack_int4` returned to values [..., head_dim] in `dtype`, rotated back.

    Sums are fp32, fp64 for fp64.
    """
    exact = torch.promote_types(dtype, torch.float32)
    head_dim = 2 * codes.shape[-1]
    units = codes.reshape(*codes.shape[:-1], head_dim // UNIT, UNIT // 2)
    halves = torch.stack((units << 4, units), -2).flatten(-3).view(torch.int8) >> 4  # the sign is the upper half's
    steps = scales.to(exact).repeat_interleave(INT4_GROUP, -1)[..., :head_dim]
    return hadamard(halves.to(exact) * steps).to(dtype)
