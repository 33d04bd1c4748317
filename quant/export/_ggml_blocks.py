"""Encodes weights as ggml blocks: without loss from packed groups, or rounded from any values.

The layout is that of ggml-common.h. Rounding equals ggml's reference bit for bit for Q4_0 and Q8_0; Q4_K searches the
scale of each group of 32 and rounds scales to six bits, as llama.cpp does.
"""

import torch
from torch import Tensor

from mycli.runtime.quantization.packed_weight import PackedWeight, unpack

GROUP = 32
_SUPER = 8  # groups in a Q4_K block
_STEPS = 21  # scales tried per group of Q4_K


def _bytes(values: Tensor) -> Tensor:
    return values.unsqueeze(-1).contiguous().view(torch.uint8)


def _nibbles(levels: Tensor) -> Tensor:
    # The first half of a group goes to the low bits, the second half to the high bits.
    stored = levels.to(torch.uint8)
    return stored[..., :16] | stored[..., 16:] << 4


def q4_0(levels: Tensor, scales: Tensor) -> Tensor:
    """Encode levels -8..7 [n, 32] and fp16 scales [n] as blocks uint8 [n, 18]."""
    return torch.cat([_bytes(scales), _nibbles(levels + 8)], dim=-1)


def q4_1(levels: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """Encode levels 0..15 [n, 32], fp16 scales and minima [n] as blocks uint8 [n, 20]."""
    return torch.cat([_bytes(scales), _bytes(minima), _nibbles(levels)], dim=-1)


def q8_0(levels: Tensor, scales: Tensor) -> Tensor:
    """Encode levels -128..127 [n, 32] and fp16 scales [n] as blocks uint8 [n, 34]."""
    return torch.cat([_bytes(scales), levels.to(torch.int8).contiguous().view(torch.uint8)], dim=-1)


def from_packed(weight: PackedWeight, kind: str) -> tuple[Tensor, bool] | None:
    """Encode a packed weight as blocks of Q4_0, Q4_1, Q8_0 or MXFP4; the flag tells whether values are exactly equal.

    None if the type cannot hold such groups. Scales and minima are rounded to fp16.
    """
    packing, columns = weight.packing, weight.in_features
    if kind == "MXFP4":
        return _mxfp4(weight)
    size = columns // packing.groups(columns)
    widest = 8 if kind == "Q8_0" else 4
    fits = packing.codes == "int" and not packing.permuted and packing.bits <= widest and size % GROUP == 0
    if not fits or packing.offsets != (kind == "Q4_1"):
        return None
    half = 1 << (packing.bits - 1)
    codes = unpack(weight.packed, packing.bits, columns).to(torch.int16).view(-1, GROUP)
    exact_scales = weight.scales.float().repeat_interleave(size // GROUP, dim=1).flatten()
    scales = exact_scales.to(torch.float16)
    exact = bool((scales.float() == exact_scales).all())
    if kind == "Q4_1":
        assert weight.offsets is not None
        exact_minima = (
            weight.offsets.double().repeat_interleave(size // GROUP, dim=1).flatten() - half * exact_scales.double()
        )
        minima = exact_minima.to(torch.float16)
        blocks = q4_1(codes, scales, minima)
        exact = exact and bool((minima.double() == exact_minima).all())
    else:
        blocks = (q4_0 if kind == "Q4_0" else q8_0)(codes - half, scales)
    return blocks.view(weight.out_features, -1), exact


def _mxfp4(weight: PackedWeight) -> tuple[Tensor, bool]:
    codes = unpack(weight.packed, 4, weight.in_features).view(-1, GROUP)
    scales = weight.scales.float().flatten()
    exponents = torch.frexp(scales).exponent - 1
    exact = bool((torch.ldexp(torch.ones_like(scales), exponents) == scales).all())
    stored = (exponents + 127).clamp(0, 254).to(torch.uint8)
    return torch.cat([stored.unsqueeze(-1), _nibbles(codes)], dim=-1).view(weight.out_features, -1), exact


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 0.0, 1 / scales)


def round_q4_0(values: Tensor) -> Tensor:
    """Round fp32 [n, 32] to blocks: the value of largest magnitude becomes level -8."""
    largest = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    scales = largest / -8
    levels = torch.trunc(values * _inverse(scales) + 8.5).clamp(0, 15)
    return q4_0(levels.to(torch.int16) - 8, scales.squeeze(-1).to(torch.float16))


def round_q8_0(values: Tensor) -> Tensor:
    """Round fp32 [n, 32] to blocks: the largest magnitude becomes level 127; halves round away from zero."""
    scales = values.abs().amax(-1, keepdim=True) / 127
    scaled = values * _inverse(scales)
    sizes = scaled.abs()
    whole = sizes.floor()
    levels = scaled.sign() * (whole + (2 * (sizes - whole)).floor())
    return q8_0(levels, scales.squeeze(-1).to(torch.float16))


def _affine_search(values: Tensor) -> tuple[Tensor, Tensor]:
    # Scale and minimum (at most 0) of each group [..., 32] for levels 0..15, of least weighted squared error. Weights
    # favour large values; for the levels of each scale tried, scale and minimum are fitted by least squares.
    weights = values.square().mean(-1, keepdim=True).sqrt() + values.abs()
    low = values.amin(-1, keepdim=True).clamp(max=0)
    span = (values.amax(-1, keepdim=True) - low).clamp(min=1e-30)
    best_scale, best_low, best = span / 15, low, torch.full_like(low, torch.inf)
    total, first = weights.sum(-1, keepdim=True), (weights * values).sum(-1, keepdim=True)
    for step in range(_STEPS):
        levels = ((values - low) * ((14 + 2.0 * step / (_STEPS - 1)) / span)).round().clamp(0, 15)
        sums = [(weights * part).sum(-1, keepdim=True) for part in (levels, levels * levels, levels * values)]
        determinant = total * sums[1] - sums[0] * sums[0]
        solvable = determinant > 0
        scale = torch.where(solvable, (total * sums[2] - first * sums[0]) / determinant, span / 15)
        start = torch.where(solvable, (sums[1] * first - sums[0] * sums[2]) / determinant, low)
        alone = sums[2] / sums[1].clamp(min=1e-30)
        scale, start = torch.where(start > 0, alone, scale), start.clamp(max=0)
        error = (weights * (levels * scale + start - values).square()).sum(-1, keepdim=True)
        better = (error < best) & (scale > 0)
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, start, best_low)
        best = torch.where(better, error, best)
    return best_scale.squeeze(-1), best_low.squeeze(-1)


def round_q4_k(values: Tensor) -> Tensor:
    """Round fp32 [n, 256] to blocks uint8 [n, 144]."""
    groups = values.view(-1, _SUPER, GROUP)
    scales, minima = _affine_search(groups)
    nested, coarse = _nest(scales), _nest(-minima)
    scale, low = nested[0] * nested[1].float().unsqueeze(-1), coarse[0] * coarse[1].float().unsqueeze(-1)
    levels = ((groups + low.unsqueeze(-1)) * _inverse(scale).unsqueeze(-1)).round().clamp(0, 15).to(torch.uint8)
    pairs = levels.view(-1, _SUPER // 2, 2, GROUP)
    stored = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
    header = torch.cat([_bytes(nested[1]), _bytes(coarse[1])], dim=-1)
    return torch.cat([header, _six_bits(nested[0].to(torch.uint8), coarse[0].to(torch.uint8)), stored], dim=-1)


def _nest(values: Tensor) -> tuple[Tensor, Tensor]:
    # Values >= 0 [n, 8] as integers 0..63 times an fp16 factor [n].
    unit = (values.amax(-1) / 63).to(torch.float16)
    return (values * _inverse(unit.float()).unsqueeze(-1)).round().clamp(0, 63), unit


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    # Eight scales and eight minima of six bits [n, 8] in the 12 bytes of a block.
    low = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, minima)]
    return torch.cat([*low, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4], dim=-1)
