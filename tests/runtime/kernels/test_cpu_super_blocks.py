"""Test super-block scales on the CPU: stored as bytes and factors, summed as integers, bit for bit by the rule."""

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library.build import Native, native
from mycli.runtime.kernels.cpu.matmul import CpuMatmul
from mycli.runtime.quantization.packed_weight import PackedWeight, dequantize, unpack
from mycli.runtime.quantization.scale_codes import scale_codes
from mycli.runtime.quantization.scheme import SCALE_UNITS, SUPER_BLOCK, ActivationBits, ByteScales, Codes
from tests.support.packed_weights import byte_scale_weight, code_bits, super_block_weight

KINDS = ((2, 16, True), (3, 16, False), (4, 32, True), (5, 32, True), (6, 16, False))  # of ggml's K-quants

pytestmark = pytest.mark.skipif(isinstance(native(), Declined), reason=f"no native code here: {native()}")


def whole(weight: PackedWeight) -> PackedWeight:
    return replace(weight, factors=None, packing=replace(weight.packing, byte_scales=None))


def as_float(number: Fraction) -> Fraction:
    """Return `number` rounded to fp32."""
    return Fraction(torch.tensor(float(number), dtype=torch.float64).float().item())


def as_integers(row: Tensor, span: int, kept: int) -> tuple[Tensor, list[Fraction]]:
    """Return bf16 [K] as integers per span with `kept` bits below the largest's leading bit, and the units."""
    spans = row.view(-1, span)
    beyond = (spans.abs().amax(1).view(torch.int16) + 1).view(torch.bfloat16)  # or the largest may round up by one bit
    units = [Fraction(2) ** (int(one) - 1 - kept) for one in torch.frexp(beyond.float()).exponent]
    return torch.cat([torch.round(one.float() / float(unit)) for one, unit in zip(spans, units, strict=True)]), units


def by_the_rule(weight: PackedWeight, x: Tensor) -> Tensor:
    """Multiply bf16 [M, K] by `weight` in fp32 by the rule of packed_cpu.cpp, one number at a time.

    Activations of a span are integer multiples of its unit; their sum with codes times integer scales is exact and is
    scaled once; the offsets of the groups are added afterwards.
    """
    levels, packing, inputs = scale_codes(weight), weight.packing, weight.in_features
    group, factors, offsets = packing.group_size, weight.factors, weight.offsets
    assert levels is not None and factors is not None and group is not None
    span, kept = {5: (64, 14), 6: (64, 12)}.get(packing.bits, (128, 14))
    codes = unpack(weight.packed, packing.bits, inputs).int() - (1 << (packing.bits - 1))
    whole = codes * levels.scales.int().repeat_interleave(group, dim=1)
    y = torch.empty(len(x), weight.out_features)
    for m, n in product(range(len(x)), range(weight.out_features)):
        integers, units = as_integers(x[m], span, kept)
        products, total = integers * whole[n], Fraction(0)
        for at, unit in zip(range(0, inputs, span), units, strict=True):
            scale = as_float(Fraction(factors[n, at // SUPER_BLOCK, 0].item()) * unit)
            total = as_float(total + as_float(Fraction(int(products[at : at + span].double().sum()))) * scale)
            for first in range(at, at + span, group):
                if offsets is not None:
                    shift = as_float(int(integers[first : first + group].sum()) * unit)
                    total = as_float(total + Fraction(offsets[n, first // group].item()) * shift)
        y[m, n] = float(total)
    return y


@pytest.mark.parametrize("bits, group, offsets", KINDS, ids=str)
def test_products_are_by_the_rule(library: Native, bits: int, group: int, offsets: bool) -> None:
    """The activations have outliers, and the row counts cover the register kernel and the panel kernel."""
    weight = super_block_weight(bits, (19, 512), group, offsets=offsets)
    x = torch.randn(7, 512, generator=torch.Generator().manual_seed(bits))
    x[:, ::97] *= 100
    expected = by_the_rule(weight, x.bfloat16()).bfloat16()
    for rows in (1, 2, 3, 4, 7):
        assert torch.equal(CpuMatmul(library, weight)(x[:rows].bfloat16()), expected[:rows]), rows


@pytest.mark.parametrize("bits, group, offsets", KINDS, ids=str)
def test_a_row_does_not_know_its_neighbours(library: Native, bits: int, group: int, offsets: bool) -> None:
    """The case has a partial row block and two column spans per thread; the result also equals an fp32 product."""
    weight = super_block_weight(bits, (85, 768), group, offsets=offsets)
    nested, plain = CpuMatmul(library, weight), CpuMatmul(library, whole(weight))
    assert torch.equal(nested.dequantize(), dequantize(weight))
    x = torch.randn(40, 768, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([nested(row[None]) for row in x.bfloat16()])
    for rows in (2, 3, 4, 5, 13, 40):
        assert torch.equal(nested(x[:rows].bfloat16()), alone[:rows]), rows
    for rows in (1, 3, 40):
        assert torch.equal(nested(x[:rows]), plain(x[:rows])), rows
    exact = x.bfloat16().double() @ dequantize(weight).double().T
    assert (alone - exact).abs().max() / exact.abs().max() < 0.005  # of bf16


@pytest.mark.parametrize("bits, group, offsets", KINDS, ids=str)
def test_the_largest_sums_fit(library: Native, bits: int, group: int, offsets: bool) -> None:
    """Check that codes, integer scales and activations at their limits with one sign do not overflow."""
    weight = super_block_weight(bits, (16, 512), group, offsets=offsets)
    factor = torch.full_like(weight.factors, 2.0**-10) if weight.factors is not None else None
    scales = torch.full_like(weight.scales, (63 if offsets else -128) * 2.0**-10)
    zero = None if weight.offsets is None else scales * (1 << (bits - 1))
    largest = replace(weight, packed=torch.zeros_like(weight.packed), scales=scales, offsets=zero, factors=factor)
    assert scale_codes(largest) is not None
    x = torch.full((5, 512), 1.984375).bfloat16()  # one bit more would need the next power of two
    exact = x.double() @ dequantize(largest).double().T
    for rows in (1, 5):
        assert torch.allclose(CpuMatmul(library, largest)(x[:rows]).double(), exact[:rows], rtol=0.004, atol=1e-6), rows


@pytest.mark.parametrize("bits, group, offsets", KINDS, ids=str)
def test_what_is_held_is_what_is_counted(library: Native, bits: int, group: int, offsets: bool) -> None:
    weight = super_block_weight(bits, (64, 512), group, offsets=offsets)
    assert CpuMatmul(library, weight).nbytes == weight.packing.bytes(64, 512)
    on_gpu = replace(weight.packing.on_gpu() or weight.packing, bits=bits, byte_scales=None)
    assert on_gpu.bytes(64, 512, 4) == whole(weight).nbytes


@pytest.mark.parametrize("activations", [16, 8])
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("codes", ["iq4", "iq2"])
def test_a_table_with_super_blocks_has_the_bits_of_its_scales(
    library: Native, codes: Codes, group: int, activations: ActivationBits
) -> None:
    """Check tables of 4 and 3 bits against the same weights with fp32 scales, for an odd number of row blocks."""
    weight = super_block_weight(code_bits(codes), (48, 768), group, offsets=False)
    packing = replace(weight.packing, codes=codes, activations=activations)
    weight = replace(weight, packing=packing, scales=weight.scales * SCALE_UNITS.get(codes, 1.0))
    nested, plain = CpuMatmul(library, weight), CpuMatmul(library, whole(weight))
    assert torch.equal(nested.dequantize(), dequantize(weight))
    assert nested.nbytes == weight.packing.bytes(48, 768) < 0.9 * plain.nbytes
    x = torch.randn(140, 768, generator=torch.Generator().manual_seed(1))
    for rows in (1, 2, 4, 5, 6, 13, 40, 140):
        assert torch.equal(nested(x[:rows].bfloat16()), plain(x[:rows].bfloat16())), rows
        assert torch.equal(nested(x[:rows]), plain(x[:rows])), rows


@pytest.mark.parametrize("activations", [16, 8])
@pytest.mark.parametrize("kind, group", [("e4m3", 16), ("e4m3", 32), ("e8m0", 32)], ids=str)
def test_scales_of_nvfp4_and_mxfp4_are_bytes(
    library: Native, kind: ByteScales, group: int, activations: ActivationBits
) -> None:
    """The bits are those of the same scales in fp32, for partial row blocks and few, some and many rows."""
    weight = byte_scale_weight(kind, (85, 768), group, factor=1 / torch.tensor(1234.567, dtype=torch.float64))
    weight = replace(weight, packing=replace(weight.packing, activations=activations))
    held, plain = CpuMatmul(library, weight), CpuMatmul(library, whole(weight))
    assert torch.equal(held.dequantize(), dequantize(weight))
    x = torch.randn(140, 768, generator=torch.Generator().manual_seed(1))
    for rows in (1, 2, 4, 5, 6, 13, 40, 140):
        assert torch.equal(held(x[:rows].bfloat16()), plain(x[:rows].bfloat16())), rows
        assert torch.equal(held(x[:rows]), plain(x[:rows])), rows
    counted = byte_scale_weight(kind, (96, 768), group)
    assert CpuMatmul(library, counted).nbytes == counted.packing.bytes(96, 768) < whole(counted).nbytes


def test_every_exponent_is_a_byte(library: Native) -> None:
    """Groups of zeros have the smallest, 2^-127, whose half is no normal fp32."""
    weight = byte_scale_weight("e8m0", (16, 255 * 32), 32)
    powers = torch.exp2(torch.arange(255, dtype=torch.float64) - 127).expand(16, 255)
    weight = replace(weight, scales=powers.bfloat16())
    held, plain = CpuMatmul(library, weight), CpuMatmul(library, whole(weight))
    assert held.nbytes == weight.packing.bytes(16, 255 * 32) < plain.nbytes
    assert torch.equal(held.dequantize(), dequantize(weight))
    for group, rows in ((0, 1), (1, 5), (2, 40), (254, 5)):
        x = torch.zeros(rows, 255 * 32)
        x[:, group * 32 : group * 32 + 32] = torch.randn(rows, 32, generator=torch.Generator().manual_seed(group))
        if group < 3:
            x *= 2.0**120
        for activations in (x.bfloat16(), x):
            assert torch.equal(held(activations), plain(activations)), (group, rows)
            assert held(activations).any(), "no product is zero"


@pytest.mark.parametrize("kind", ["e4m3", "e8m0"])
def test_scales_that_have_no_byte_are_held_whole(library: Native, kind: ByteScales) -> None:
    """A number between two of the type has no byte, a zero has no exponent, and a sign has no place."""
    weight, x = byte_scale_weight(kind, (32, 256), 32), torch.randn(3, 256).bfloat16()
    for value in (1.5, -1.0, *([0.0] if kind == "e8m0" else [])):
        weight.scales[3, 2] = value
        assert torch.equal(CpuMatmul(library, weight)(x), CpuMatmul(library, whole(weight))(x))
        assert torch.equal(CpuMatmul(library, weight).dequantize(), dequantize(weight))


def test_scales_that_factors_do_not_give_are_held_whole(library: Native) -> None:
    """The others are scales between integers, and integers or groups that the integer kernels do not support."""
    weight, x = super_block_weight(4, (32, 256), 32, offsets=True), torch.randn(3, 256).bfloat16()
    assert weight.offsets is not None
    larger = replace(weight, scales=weight.scales * 2, offsets=weight.offsets + weight.scales * 8)
    others = [super_block_weight(bits, (32, 256), group, offsets=False) for bits, group in ((6, 128), (8, 32), (4, 64))]
    for odd in (replace(weight, scales=weight.scales * 1.001), larger, *others):
        assert scale_codes(odd) is None
        assert torch.equal(CpuMatmul(library, odd)(x), CpuMatmul(library, whole(odd))(x))


def test_a_weight_takes_the_place_of_one_alike(library: Native) -> None:
    weights = [super_block_weight(4, (32, 256), 32, offsets=True, seed=seed) for seed in range(2)]
    held, x = CpuMatmul(library, weights[0]), torch.randn(3, 256).bfloat16()
    assert held.refill(weights[1])
    assert torch.equal(held(x), CpuMatmul(library, weights[1])(x))
    assert not held.refill(whole(weights[0]))
    assert torch.equal(held(x), CpuMatmul(library, weights[1])(x))
