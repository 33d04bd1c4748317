"""Scales of super-blocks: whole numbers of a byte times factors that 256 inputs of a row share (ggml's K-quants).

A scale is code * factor; an offset, where there are any, is code * factor + 2^(bits-1) * scale, because levels count
from zero there and codes from half their range. Both are exact but for one rounding to fp32. Codes of scales are bytes,
or below 64 where there are offsets, which products of integers rely on. Knows numbers, not files.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.quantization.packed_weight import PackedWeight
from mycli.runtime.quantization.scheme import SUPER_BLOCK

_GROUPS = {2: 16, 3: 16, 4: 32, 5: 32, 6: 16}  # of K-quants, by bits
_LARGEST = 63  # of a code of scales, where there are offsets


@dataclass(frozen=True)
class ScaleCodes:
    """The whole numbers of scales and of offsets, int8 [N, groups]."""

    scales: Tensor
    offsets: Tensor | None


def scale_codes(weight: PackedWeight) -> ScaleCodes | None:
    """The codes that give the scales and offsets of `weight` by its factors, to the bit; None where none do."""
    packing = weight.packing
    if weight.factors is None or packing.group_size != _GROUPS.get(packing.bits):
        return None
    repeat = SUPER_BLOCK * weight.scales.shape[1] // weight.in_features
    factors = [one.repeat_interleave(repeat, dim=1) for one in weight.factors.float().unbind(2)]
    scales = _codes(weight.scales, factors[0])
    if not torch.equal(scales * factors[0], weight.scales):
        return None
    if weight.offsets is None:
        return ScaleCodes(scales, None)
    if scales.min() < 0 or scales.max() > _LARGEST:
        return None
    half = weight.scales * (1 << (packing.bits - 1))
    offsets = _codes(weight.offsets - half, factors[1])
    return ScaleCodes(scales, offsets) if torch.equal(offsets * factors[1] + half, weight.offsets) else None


def _codes(values: Tensor, factors: Tensor) -> Tensor:
    return (values / factors).nan_to_num_(0, 0, 0).round_().clamp_(-128, 127).to(torch.int8)
