"""Test the kernel weight layout: a bijection with the file for every packing and size; padding decodes to zero."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.runtime.kernels.triton.product.weight_layout import (
    layout_of,
    padded_k,
    repack,
    repack_scales,
    tile_k,
    unpacked_k,
)
from mycli.runtime.quantization.packed_weight import unpack
from mycli.runtime.quantization.scheme import BITS, GROUP_SIZES, Packing
from tests.support.random_tensors import weight
from tests.support.weight_layout import codes_from_layout, scales_from_layout

PACKINGS = [Packing(bits, group) for bits in BITS for group in (16, *GROUP_SIZES, None)]


@given(
    packing=st.sampled_from(PACKINGS),
    rows=st.integers(1, 150),
    groups=st.integers(1, 5),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_bijection(packing: Packing, rows: int, groups: int, dtype: torch.dtype, seed: int) -> None:
    columns = groups * (packing.group_size or 24)
    original = weight(packing, rows, columns, seed, dtype)
    repacked = repack(original)
    assert repacked.dtype == torch.int16 and repacked.is_contiguous()
    found = codes_from_layout(repacked, packing, rows, columns)
    assert torch.equal(found, unpack(original.packed, packing.bits, columns))
    scales = scales_from_layout(repack_scales(original, original.scales), dtype, rows, packing.groups(columns))
    assert torch.equal(scales, original.scales)


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.name)
def test_no_bit_is_wasted_and_fill_is_zero(packing: Packing) -> None:
    layout = layout_of(packing)
    rows, columns = layout.chunk_n, 4 * (packing.group_size or 24)
    original = weight(packing, rows - 1, columns, 0)
    repacked = repack(original)
    kept = padded_k(packing, columns)
    assert repacked.numel() * 16 == rows * kept * packing.bits
    found = codes_from_layout(repacked, packing, rows, kept)
    zero = 1 << (packing.bits - 1)
    assert (found[-1] == zero).all() and (found[:, columns:] == zero).all()
    assert scales_from_layout(repack_scales(original, original.scales), torch.float16, rows, 1)[-1] == 0


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.name)
def test_a_lane_holds_the_operand_registers_of_an_mma(packing: Packing) -> None:
    """mma.m16n8k16: lane 4g + t holds rows g and g + 8, columns 2t, 2t + 1 and 8 more; here 8t .. 8t + 7 of 32.

    For groups of 16 it is 4t .. 4t + 3 of each.
    """
    layout, wide = layout_of(packing), 4 if packing.group_size == 16 else 8
    seen: dict[int, set[tuple[int, int]]] = {}
    for lane in (0, 5, 31):
        repacked = torch.zeros((1, 1, layout.words, 32, 8), dtype=torch.int16)
        repacked[:, :, :, lane] = -1
        codes = codes_from_layout(repacked.view(1, 1, layout.words, 256), packing, layout.chunk_n, layout.chunk_k)
        seen[lane] = {(int(row), int(column)) for row, column in codes.nonzero()}
        rows, columns = {row % 8 for row, _ in seen[lane]}, {column // wide % 4 for _, column in seen[lane]}
        assert rows == {lane // 4} and columns == {lane % 4}
        assert len(seen[lane]) == layout.chunk_n * layout.chunk_k // 32


def test_what_is_unpacked_at_once_is_whole_chunks_and_groups() -> None:
    for packing in PACKINGS:
        step = unpacked_k(packing)
        assert step % layout_of(packing).chunk_k == 0 and step % tile_k(packing) == 0
        assert padded_k(packing, 1) == step
