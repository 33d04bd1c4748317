"""Test products in E4M3: every number within half a step of its row's scale, products exact for what was rounded."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mycli.runtime.kernels.fp8 import Fp8Weight, round_to_fp8
from mycli.runtime.utils.dtypes import FP8_PIECE


@given(seed=st.integers(0, 1 << 20), rows=st.integers(1, 5), columns=st.integers(1, 40), power=st.integers(-60, 60))
def test_a_number_moves_by_at_most_half_a_step(seed: int, rows: int, columns: int, power: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, columns, generator=generator) * 2.0**power).bfloat16()
    codes, scales = round_to_fp8(x)
    found, exact = (codes.float() * scales).double(), x.double()
    # 3 bits of mantissa; below 2^-6 of the scale's unit the steps are all 2^-9.
    step = torch.maximum(exact.abs() * 2**-4, scales.double() * 2**-10)
    assert bool(((found - exact).abs() <= step * (1 + 2**-20)).all())
    assert torch.equal(codes.float().abs().amax(1), torch.full((rows,), 448.0)), "the whole range is used"


def test_rows_without_a_scale() -> None:
    x = torch.tensor([[0.0] * 16, [3e38] * 16, [1e-38] * 16]).bfloat16()
    codes, scales = round_to_fp8(x)
    assert torch.equal(codes[0].float(), torch.zeros(16)) and torch.isfinite(scales).all()
    assert torch.isfinite(codes.float()).all()
    for broken in (float("nan"), float("inf")):
        x[1, 3] = broken
        codes, scales = round_to_fp8(x)
        assert not torch.isfinite(codes.float() * scales)[1].all() and torch.isfinite(codes[2].float()).all()


@pytest.mark.parametrize("shape", [(65, 48, 32), (3, 16, 64), (1, 160, 16)], ids=str)
def test_the_product_is_that_of_the_rounded_numbers(shape: tuple[int, int, int]) -> None:
    rows, outputs, inputs = shape
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, inputs, generator=generator).bfloat16() for n in (outputs, rows))
    packed = Fp8Weight(weight)
    codes, scales = round_to_fp8(x)
    exact = (codes.double() * scales.double()) @ packed.dequantize().double().T
    assert torch.allclose(packed(x).double(), exact, rtol=2**-8, atol=1e-3)
    assert packed.nbytes == outputs * (inputs + 4)


def test_pieces_are_rounded_as_the_whole() -> None:
    wide = torch.randn(3, FP8_PIECE // 2 + 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scales = round_to_fp8(wide)
    for row in range(3):
        one, scale = round_to_fp8(wide[row : row + 1])
        assert torch.equal(one.float(), codes[row : row + 1].float()) and torch.equal(scale, scales[row : row + 1])
