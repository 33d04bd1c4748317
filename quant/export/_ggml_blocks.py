"""Encodes weights as ggml blocks: without loss from packed groups, or rounded from any values.

The layout is that of ggml-common.h. Rounding equals ggml's reference bit for bit.
"""

import torch
from torch import Tensor

from mycli.runtime.quantization.packed_weight import PackedWeight, unpack

GROUP = 32


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
