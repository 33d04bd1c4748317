"""Test vectors of 4-bit codes against sums and roundings written out one by one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.runtime.cache.int4 import hadamard, pack_int4, unpack_int4
from mycli.runtime.quantization.int4_vectors import int4_groups
from tests.support.random_tensors import normal

SIZES = (16, 48, 64, 80, 96, 112, 128, 192)
BLOCKS = {16: 16, 48: 16, 64: 64, 80: 16, 96: 32, 112: 16, 128: 128, 192: 64}  # error of the rotation


def matrix(head_dim: int) -> list[list[float]]:
    """Return the rotation matrix: Sylvester matrices on the diagonal, entry (i, j) from the bits that i and j share."""
    block = BLOCKS[head_dim]
    entry = lambda i, j: (-1) ** (i % block & j % block).bit_count() / math.sqrt(block)  # noqa: E731  (reason: a formula)
    return [[entry(i, j) if i // block == j // block else 0.0 for j in range(head_dim)] for i in range(head_dim)]


def slow_packing(values: list[float]) -> tuple[list[int], list[float]]:
    """Return the bytes of codes, and the scales."""
    codes, scales = list[int](), list[float]()
    for first in range(0, len(values), 32):
        group = values[first : first + 32]
        extreme = max(group) if max(group) > -min(group) else min(group)
        scale = torch.tensor([extreme / -8 + 0.0]).bfloat16()  # 0 has no sign
        ratios = torch.tensor(group) / float(scale) if float(scale) else torch.zeros(len(group))
        codes += [min(max(round(float(ratio)), -8), 7) for ratio in ratios]
        scales.append(float(scale))
    packed = list[int]()
    for unit in range(0, len(codes), 16):
        packed += [(codes[unit + i] & 15) + 16 * (codes[unit + i + 8] & 15) for i in range(8)]
    return packed, scales


@pytest.mark.parametrize("head_dim", SIZES)
def test_the_rotation_is_its_matrix_and_its_own_inverse(head_dim: int) -> None:
    x = normal(5, head_dim, seed=1).double()
    rotation = torch.tensor(matrix(head_dim), dtype=torch.float64)
    torch.testing.assert_close(hadamard(x), x @ rotation)
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(head_dim, dtype=torch.float64))


@pytest.mark.parametrize("head_dim", SIZES)
def test_codes_and_scales_are_those_rounded_one_by_one(head_dim: int) -> None:
    values = normal(4, head_dim, seed=head_dim)
    values[1] = 0
    codes, scales = pack_int4(values)
    assert codes.shape == (4, head_dim // 2) and scales.shape == (4, int4_groups(head_dim))
    for *packed, rotated in zip(codes.tolist(), scales.tolist(), hadamard(values).tolist(), strict=True):
        assert tuple(packed) == slow_packing(rotated)


@given(
    seed=st.integers(0, 999),
    magnitude=st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]),
    head_dim=st.sampled_from(SIZES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=40, deadline=None)
def test_values_are_within_a_step(seed: int, magnitude: float, head_dim: int, dtype: torch.dtype) -> None:
    """A step is an eighth of the extreme, rounded to bf16; errors are at most half of it, or reach to the last code."""
    values = (magnitude * normal(3, head_dim, seed=seed)).to(dtype).double()
    codes, scales = pack_int4(values.to(dtype))
    rotated, step = hadamard(values), scales.double().repeat_interleave(32, -1)[:, :head_dim]
    errors = hadamard(unpack_int4(codes, scales, torch.float64) - values) / step
    for group, scale in zip(rotated.split(32, -1), scales.double().unbind(-1), strict=True):
        largest = group.abs().amax(-1)
        assert ((8 * scale.abs() - largest).abs() <= 1.0001 * 2**-8 * largest).all()
    beyond = (rotated / step - (rotated / step).clamp(-8, 7)).abs()
    assert (errors.abs() <= beyond.clamp(min=0.5) + 1e-4).all()


def test_one_large_dimension_does_not_take_the_codes_of_the_others() -> None:
    """Check that one outlier dimension, common in keys, does not cost the other dimensions their precision."""
    values = normal(200, 64, seed=3)
    values[:, 5] *= 40
    rotated = unpack_int4(*pack_int4(values), torch.float32) - values
    plain = hadamard(unpack_int4(*pack_int4(hadamard(values)), torch.float32)) - values  # the rotations undo each other
    others = [dim for dim in range(32) if dim != 5]
    assert float(rotated[:, others].square().mean()) < 0.7 * float(plain[:, others].square().mean())


def test_a_vector_is_rounded_by_itself() -> None:
    values = normal(6, 3, 80, seed=4)
    for index, whole in enumerate(pack_int4(values)):
        assert all(torch.equal(pack_int4(values[i, j])[index], whole[i, j]) for i in range(6) for j in range(3))
        assert torch.equal(pack_int4(values.transpose(0, 1))[index], whole.transpose(0, 1))


def test_what_is_not_finite_is_not_hidden_by_rounding() -> None:
    values = torch.ones(3, 96)
    values[0, 1], values[1, 40] = torch.nan, torch.inf
    unpacked = unpack_int4(*pack_int4(values), torch.float32).isnan()
    assert unpacked[0, :32].all() and unpacked[1, 32:64].all(), "the block of 32 that it was rotated with"
    assert int(unpacked.sum()) == 64


def test_no_vectors_are_no_bytes() -> None:
    codes, scales = pack_int4(torch.zeros(3, 0, 80))
    assert codes.shape == (3, 0, 40) and scales.shape == (3, 0, 3)
    assert unpack_int4(codes, scales, torch.float32).shape == (3, 0, 80)


def test_what_is_smaller_than_any_scale_is_nothing() -> None:
    assert not any(part.any() for part in pack_int4(torch.full((64,), 1e-39)))
