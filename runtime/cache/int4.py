"""Vectors of 4-bit codes: rotated by a Hadamard transform, then rounded in groups of 32 with a scale each.

A few dimensions of keys are many times larger than the others, and would take the scale of their group for themselves.
A rotation spreads them over all (QuaRot, arXiv 2404.00456); it is orthonormal and its own inverse, and leaves products
of a key and a query that is rotated likewise as they were. A head whose size is no power of two is rotated in blocks of
the largest that divides it: 80 in blocks of 16, 96 of 32.

A scale is the extreme of its group / -8, signed, in bf16: the extreme has the code -8 whatever its sign, so that all 16
codes are used. Every vector is rounded by itself. The arithmetic is fp32 in a fixed order, and native code has the same
bits (`attention_int4.h`). How the bytes lie is in `runtime.quantization.int4_vectors`. Does not know caches or blocks.
"""

import math

import torch
from torch import Tensor

from mycli.runtime.quantization.int4_vectors import INT4_GROUP, UNIT, int4_bytes, int4_groups, int4_head_dim

_SMALLEST = torch.finfo(torch.float32).tiny  # a scale below it is 0


def hadamard(x: Tensor) -> Tensor:
    """x [..., size], floating, rotated; its own inverse. Sums are made in the dtype of x, neighbours first."""
    size = x.shape[-1]
    block = size & -size  # the largest power of two that divides it
    step, y = 1, x
    while step < block:
        first, second = y.reshape(*x.shape[:-1], size // (2 * step), 2, step).unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        step *= 2
    return y * (1 / math.sqrt(block))


def pack_int4(values: Tensor) -> Tensor:
    """values [..., head_dim] as uint8 [..., bytes]. What is not finite makes its block of the rotation NaN.

    Raises ModelError for heads that are not a multiple of 16.
    """
    *outer, head_dim = values.shape
    nbytes, groups = int4_bytes(head_dim), int4_groups(head_dim)
    rotated = hadamard(values.float())
    whole = torch.nn.functional.pad(rotated, (0, groups * INT4_GROUP - head_dim))
    padded = whole.view(*outer, groups, INT4_GROUP)
    low, high = padded.amin(-1), padded.amax(-1)
    extreme = torch.where(high > -low, high, low)
    scales = (extreme * -0.125).bfloat16()
    steps = scales.float()
    finite, tiny = extreme.isfinite(), steps.abs() < _SMALLEST
    scales = scales.masked_fill(tiny, 0).masked_fill(~finite, torch.nan)
    codes = (padded / steps.masked_fill(tiny, torch.inf).unsqueeze(-1)).round_().nan_to_num_(0).clamp_(-8, 7)
    halves = codes.flatten(-2)[..., :head_dim].to(torch.int8).view(torch.uint8) & 15
    lower, upper = halves.reshape(*outer, head_dim // UNIT, 2, UNIT // 2).unbind(-2)
    packed = torch.empty(*outer, nbytes, dtype=torch.uint8, device=values.device)
    packed[..., : head_dim // 2] = (lower | upper << 4).flatten(-2)
    packed[..., head_dim // 2 :] = scales.view(torch.uint8)
    return packed


def unpack_int4(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """packed uint8 [..., bytes] as values [..., head_dim] in `dtype`, rotated back. Sums are fp32, or fp64 for that."""
    exact = torch.promote_types(dtype, torch.float32)
    head_dim = int4_head_dim(packed.shape[-1])
    units = packed[..., : head_dim // 2].reshape(*packed.shape[:-1], head_dim // UNIT, UNIT // 2)
    codes = torch.stack((units << 4, units), -2).flatten(-3).view(torch.int8) >> 4  # the sign is the upper half's
    scales = packed[..., head_dim // 2 :].contiguous().view(torch.bfloat16).to(exact)
    return hadamard(codes.to(exact) * scales.repeat_interleave(INT4_GROUP, -1)[..., :head_dim]).to(dtype)
