"""Test the packed layout: a bijection, the specified bit stream, and exact dequantization."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.runtime.quantization.packed_weight import PackedWeight, dequantize, pack, stack, unpack
from mycli.runtime.quantization.scheme import Packing, stacked_packing

WIDTHS = range(2, 9)  # including those that are read


def stream_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """Implement the specification bit by bit: code i occupies bits [i*bits, (i+1)*bits) of its row."""
    rows, columns = codes.shape
    words = (columns * bits + 31) // 32
    out = np.zeros((rows, words), dtype=np.uint32)
    for row in range(rows):
        for i in range(columns):
            for bit in range(bits):
                if codes[row, i] >> bit & 1:
                    position = i * bits + bit
                    out[row, position // 32] |= np.uint32(1 << position % 32)
    return out.view(np.int32)


@given(bits=st.sampled_from(WIDTHS), rows=st.integers(1, 5), columns=st.integers(1, 100), seed=st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_pack_is_the_specified_stream_and_a_bijection(bits: int, rows: int, columns: int, seed: int) -> None:
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, 1 << bits, (rows, columns), dtype=np.uint8))
    packed = pack(codes, bits)
    assert packed.dtype == torch.int32
    assert np.array_equal(packed.numpy(), stream_of(codes.numpy(), bits))
    assert torch.equal(unpack(packed, bits, columns), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_word_is_reachable(bits: int) -> None:
    """Check that packing is surjective: any 32-bit words unpack to codes that pack to the same words."""
    words = torch.randint(-(1 << 31), 1 << 31, (3, bits * 4), generator=torch.Generator().manual_seed(0)).to(
        torch.int32
    )
    assert torch.equal(pack(unpack(words, bits, 128), bits), words)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [32, 64, None])
@pytest.mark.parametrize("bits", WIDTHS)
def test_dequantize_is_code_minus_half_range_times_scale(bits: int, group: int | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (6, 128), generator=generator).to(torch.uint8)
    scales = torch.randn((6, 128 // (group or 128)), generator=generator).to(dtype)
    weight = dequantize(PackedWeight(pack(codes, bits), scales, Packing(bits, group), 128))
    expected = torch.empty(6, 128, dtype=dtype)
    for row in range(6):
        for column in range(128):
            signed = int(codes[row, column]) - 2 ** (bits - 1)
            expected[row, column] = (scales[row, column // (group or 128)].double() * signed).to(dtype)
    assert torch.equal(weight, expected)
    assert (scales < 0).any(), "signed scales are part of the format"


def test_offsets_shift_each_group() -> None:
    """The weight with zero points z is (u - z) * s."""
    codes = torch.randint(0, 16, (5, 64), dtype=torch.uint8)
    zeros, scales = torch.randint(0, 17, (5, 2)), torch.rand(5, 2)
    packing = Packing(4, 32, offsets=True)
    weight = dequantize(PackedWeight(pack(codes, 4), scales, packing, 64, (8 - zeros) * scales))
    expected = ((codes.view(5, 2, 32).double() - zeros.unsqueeze(-1)) * scales.unsqueeze(-1).double()).view(5, 64)
    assert torch.allclose(weight.double(), expected, rtol=0, atol=1e-6)
    assert packing.name == "int4-g32-offset"


@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(WIDTHS), st.sampled_from((16, 32, 64, None)), st.booleans(), st.booleans()),
        min_size=2,
        max_size=3,
        unique=True,
    ),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_stacked_weights_are_the_same_numbers(kinds: list[tuple[int, int | None, bool, bool]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for rows, (bits, group, offsets, table) in enumerate(kinds, 1):
        packing = Packing(4 if table else bits, group, offsets=offsets, codes="iq4" if table else "int")
        codes = torch.randint(0, 1 << packing.bits, (rows, 128), generator=generator).to(torch.uint8)
        scales = torch.randn(rows, packing.groups(128), generator=generator)
        added = torch.randn(scales.shape, generator=generator) if offsets else None
        weights.append(PackedWeight(pack(codes, packing.bits), scales, packing, 128, added))
    packing = stacked_packing([weight.packing for weight in weights])
    if packing is not None:  # the same kind twice: a table has one width
        whole = stack(weights, packing)
        assert whole.packing == packing and whole.out_features == sum(range(1, len(kinds) + 1))
        assert torch.equal(dequantize(whole), torch.cat([dequantize(weight) for weight in weights]))
