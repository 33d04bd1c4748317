"""Implements the product with 8-bit activations in plain torch, as defined in one_byte.h: slow, bit-identical."""

import torch
from torch import Tensor

from mycli.runtime.quantization.codes import code_values
from mycli.runtime.quantization.packed_weight import PackedWeight, unpack

SEGMENT, SPAN = 32, 128  # inputs that share a unit, and the most inputs whose sums share a scale


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of fp32, rounded once: the fp64 sum is rounded to odd first (Boldo and Melquiond, 2008)."""
    exact, c = a.double() * b.double(), c.double()
    total = exact + c
    other = total - exact
    error = (exact - (total - other)) + (c - other)
    bits = total.view(torch.int64)
    even = (error != 0) & (bits & 1 == 0)
    odd = torch.where((error > 0) == (total > 0), bits + 1, bits - 1)
    return torch.where(even, odd, bits).view(torch.float64).float()


def integers(x: Tensor, segment: int) -> tuple[Tensor, Tensor]:
    """Return integers [rows, segments, segment] and units [rows, segments] of bf16 activations, as fp64 and fp32."""
    parts = x.float().view(len(x), -1, segment)
    extent = parts.abs().amax(-1).clamp(min=2.0**-100)
    scale = torch.tensor(127.0) / extent
    return (parts.double() * scale.unsqueeze(-1).double()).round(), extent * (torch.tensor(1.0) / 127)


def product(x: Tensor, weight: PackedWeight) -> Tensor:
    """Multiply x [rows, K] bf16, finite, by the weight; return [rows, N] bf16."""
    packing, inputs = weight.packing, weight.in_features
    group = inputs // packing.groups(inputs)
    span = next(size for size in (SPAN, 64, 32, 16) if group % size == 0)
    segment = min(span, SEGMENT)
    codes = code_values(unpack(weight.packed, packing.bits, inputs), packing, torch.float64)
    scales = weight.scales.float()
    if packing.codes == "e2m1":
        codes, scales = codes * 2, scales / 2
    numbers, units = integers(x, segment)
    sums = torch.einsum("msi,nsi->smn", numbers, codes.view(len(codes), -1, segment)).float()
    totals = numbers.sum(-1).float()
    y = torch.zeros(len(x), len(codes))
    for first in range(0, inputs, span):
        part, shift = torch.zeros_like(y), torch.zeros(len(x))
        for s in range(first // segment, (first + span) // segment):
            part = fused(sums[s], units[:, s : s + 1].expand_as(part), part)
            shift = fused(totals[:, s], units[:, s], shift)
        y = fused(part, scales[:, first // group].expand_as(y), y)
        if weight.offsets is not None:
            y = fused(weight.offsets[:, first // group].expand_as(y), shift.unsqueeze(1).expand_as(y), y)
    return y.bfloat16()
