"""Scales of super-blocks: one-byte integers times a factor that 256 inputs of a row share (ggml's K- and IQ-quants)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.quantization.packed_weight import PackedWeight
from mycli.runtime.quantization.scheme import INTEGER_TABLES, SCALE_UNITS, SUPER_BLOCK

# A scale is code * factor, of codebooks times a power of 2. An offset is code * factor + 2^(bits-1) * scale, because
# levels count from zero there and codes from half their range. Both are exact except for one rounding to fp32.
_GROUPS = {2: 16, 3: 16, 4: 32, 5: 32, 6: 16}  # bits -> group size of K-quants
_TABLE_GROUPS = (16, 32)
_MAX_SCALE_CODE = 63  # with offsets; integer products rely on it


@dataclass(frozen=True)
class ScaleCodes:
    scales: Tensor  # int8 [N, groups]
    offsets: Tensor | None  # as scales


def scale_codes(weight: PackedWeight) -> ScaleCodes | None:
    """Return codes that reproduce the scales and offsets of `weight` exactly with its factors, or None."""
    packing = weight.packing
    groups = _TABLE_GROUPS if packing.codes in INTEGER_TABLES else (_GROUPS.get(packing.bits),)
    if weight.factors is None or packing.group_size not in groups:
        return None
    repeat = SUPER_BLOCK * weight.scales.shape[1] // weight.in_features
    factors = [factor.repeat_interleave(repeat, dim=1) for factor in weight.factors.float().unbind(2)]
    factors[0] *= SCALE_UNITS.get(packing.codes, 1.0)
    scales = _codes(weight.scales, factors[0])
    if not torch.equal(scales * factors[0], weight.scales):
        return None
    if weight.offsets is None:
        return ScaleCodes(scales, None)
    if scales.min() < 0 or scales.max() > _MAX_SCALE_CODE:
        return None
    half = weight.scales * (1 << (packing.bits - 1))
    offsets = _codes(weight.offsets - half, factors[1])
    return ScaleCodes(scales, offsets) if torch.equal(offsets * factors[1] + half, weight.offsets) else None


def _codes(values: Tensor, factors: Tensor) -> Tensor:
    return (values / factors).nan_to_num_(0, 0, 0).round_().clamp_(-128, 127).to(torch.int8)
