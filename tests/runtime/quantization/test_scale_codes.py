"""Test conversion of super-block scales to integers: the original ones, or None."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.runtime.quantization.scale_codes import scale_codes
from mycli.runtime.quantization.scheme import ByteScales
from tests.support.packed_weights import byte_scale_weight, super_block_weight


@given(
    bits=st.sampled_from((2, 3, 4, 5, 6)),
    offsets=st.booleans(),
    size=st.floats(2.0**-14, 1000),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_codes_give_the_scales_and_offsets(bits: int, offsets: bool, size: float, seed: int) -> None:
    group = 32 if bits in (4, 5) else 16
    weight = super_block_weight(bits, (9, 512), group, offsets=offsets, seed=seed, size=size)
    codes = scale_codes(weight)
    assert codes is not None and weight.factors is not None
    factors = weight.factors.double().repeat_interleave(256 // group, dim=1)
    assert torch.equal((codes.scales * factors[..., 0]).float(), weight.scales)
    assert (codes.offsets is None) is not offsets
    if codes.offsets is not None:
        exact = codes.offsets * factors[..., 1] + weight.scales.double() * (1 << (bits - 1))
        assert torch.equal(exact.float(), weight.offsets)


def test_factors_of_nothing_give_nothing() -> None:
    weight = super_block_weight(4, (8, 256), 32, offsets=True, size=0)
    codes = scale_codes(weight)
    assert codes is not None and codes.offsets is not None
    assert not codes.scales.any() and not codes.offsets.any()


@pytest.mark.parametrize("bits, group", [(4, 16), (6, 32), (8, 16), (8, 32), (4, 128)], ids=str)
def test_groups_that_no_k_quant_has_have_no_codes(bits: int, group: int) -> None:
    assert scale_codes(super_block_weight(bits, (8, 256), group, offsets=False)) is None


@pytest.mark.parametrize("place", ["scales", "offsets"])
def test_a_number_that_is_no_multiple_has_no_codes(place: str) -> None:
    weight = super_block_weight(4, (8, 256), 32, offsets=True)
    values = getattr(weight, place).clone()
    values[3, 2] *= 1.001
    assert scale_codes(replace(weight, **{place: values})) is None
    assert scale_codes(replace(weight, factors=None)) is None


@given(size=st.floats(2.0**-20, 1000), divided=st.booleans(), seed=st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_codes_of_e4m3_give_the_scales(size: float, divided: bool, seed: int) -> None:
    """ModelOpt multiplies by a factor in fp32, compressed-tensors divides by one: both in one rounding."""
    stored = torch.tensor(size).double()
    weight = byte_scale_weight("e4m3", (9, 512), 16, factor=1 / stored if divided else stored, seed=seed)
    codes = scale_codes(weight)
    assert codes is not None and codes.factors is not None and codes.offsets is None
    numbers = codes.scales.float()
    assert torch.equal(numbers / stored.float() if divided else numbers * stored.float(), weight.scales)
    exact = [Fraction(number) * sum(map(Fraction, codes.factors[0, 0].tolist())) for number in numbers[0].tolist()]
    assert [torch.tensor(float(one), dtype=torch.float64).float().item() for one in exact] == weight.scales[0].tolist()


@pytest.mark.parametrize("value", [-1.0, 0.3, float("nan")], ids=str)
@pytest.mark.parametrize("kind", ["e4m3", "e8m0"])
def test_a_number_that_no_byte_gives_has_no_codes(kind: ByteScales, value: float) -> None:
    weight = byte_scale_weight(kind, (8, 256), 32)
    assert scale_codes(weight) is not None
    weight.scales[3, 2] = value
    assert scale_codes(weight) is None
