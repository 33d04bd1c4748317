"""Scales of a byte each, of which CPU kernels make exactly the scales of a weight."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.quantization.packed_weight import PackedWeight
from mycli.runtime.quantization.scheme import INTEGER_TABLES, SCALE_UNITS, SUPER_BLOCK

# In ggml's super-blocks a scale is code * factor, of codebooks times a power of 2. An offset is code * factor +
# 2^(bits-1) * scale, because levels count from zero there and codes from half their range. Both are exact except for
# one rounding to fp32.
_GROUPS = {2: 16, 3: 16, 4: 32, 5: 32, 6: 16}  # bits -> group size of K-quants
_TABLE_GROUPS = (16, 32)
_MAX_SCALE_CODE = 63  # with offsets; integer products rely on it
_PART_ROWS = 256  # converted at a time, since fp64 takes memory


@dataclass(frozen=True)
class ScaleCodes:
    """Scales of one byte: int8 times factors, E4M3 times factors, or E8M0 alone."""

    scales: Tensor  # [N, groups]
    offsets: Tensor | None  # as scales
    factors: Tensor | None  # `PackedWeight.factors`


def scale_codes(weight: PackedWeight) -> ScaleCodes | None:
    """Return codes that give the scales and offsets of `weight` exactly, or None if there are none."""
    match weight.packing.byte_scales:
        case "super_blocks":
            return _super_blocks(weight)
        case "e4m3":
            return _e4m3(weight)
        case "e8m0":
            return _e8m0(weight)
        case None:
            return None


def _super_blocks(weight: PackedWeight) -> ScaleCodes | None:
    packing = weight.packing
    groups = _TABLE_GROUPS if packing.codes in INTEGER_TABLES else (_GROUPS.get(packing.bits),)
    if weight.factors is None or packing.group_size not in groups:
        return None
    repeat = SUPER_BLOCK * weight.scales.shape[1] // weight.in_features
    factors = [factor.repeat_interleave(repeat, dim=1) for factor in weight.factors.float().unbind(2)]
    factors[0] *= SCALE_UNITS.get(packing.codes, 1.0)
    scales = _integers(weight.scales, factors[0])
    if not torch.equal(scales * factors[0], weight.scales):
        return None
    if weight.offsets is None:
        return ScaleCodes(scales, None, weight.factors)
    if scales.min() < 0 or scales.max() > _MAX_SCALE_CODE:
        return None
    half = weight.scales * (1 << (packing.bits - 1))
    offsets = _integers(weight.offsets - half, factors[1])
    if not torch.equal(offsets * factors[1] + half, weight.offsets):
        return None
    return ScaleCodes(scales, offsets, weight.factors)


def _integers(values: Tensor, factors: Tensor) -> Tensor:
    return (values / factors).nan_to_num_(0, 0, 0).round_().clamp_(-128, 127).to(torch.int8)


def _e4m3(weight: PackedWeight) -> ScaleCodes | None:
    if weight.factors is None:
        return None
    codes = torch.empty_like(weight.scales, dtype=torch.float8_e4m3fn)
    for start in range(0, len(codes), _PART_ROWS):
        rows = slice(start, start + _PART_ROWS)
        stored, (high, low) = weight.scales[rows], weight.factors[rows].unbind(2)
        numbers = codes[rows].copy_(stored / high).float()
        scales = (numbers.double() * high + numbers * low).float()  # a multiplication and an addition in one rounding
        if not torch.equal(scales, stored) or bool(torch.signbit(stored).any()):
            return None
    return ScaleCodes(codes, None, weight.factors)


def _e8m0(weight: PackedWeight) -> ScaleCodes | None:
    # Powers of two have only the bits of their exponent in fp32, but 2^-127, the scale of groups of zeros.
    words = weight.scales.float().view(torch.int32)
    exponents = words >> 23
    exact = torch.equal(torch.where(exponents == 0, 1 << 22, exponents << 23), words) and bool((words > 0).all())
    return ScaleCodes(exponents.to(torch.uint8).view(torch.float8_e8m0fnu), None, None) if exact else None
