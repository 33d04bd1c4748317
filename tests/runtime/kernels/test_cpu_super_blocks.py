"""Scales of super-blocks on the CPU: held as bytes and factors, with the bits of the same scales held as they are."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from mycli.runtime.kernels.cpu.library.build import Native, native
from mycli.runtime.kernels.cpu.matmul import CpuMatmul
from mycli.runtime.quantization.packed_weight import PackedWeight, dequantize
from tests.support.packed_weights import super_block_weight

KINDS = ((2, 16, True), (3, 16, False), (4, 32, True), (5, 32, True), (6, 16, False))  # of ggml's K-quants

pytestmark = pytest.mark.skipif(isinstance(native(), str), reason=f"no native code here: {native()}")


def whole(weight: PackedWeight) -> PackedWeight:
    """The same numbers, scales and offsets in fp32."""
    return replace(weight, factors=None, packing=replace(weight.packing, super_blocks=False))


@pytest.mark.parametrize("bits, group, offsets", KINDS, ids=str)
def test_bits_are_those_of_whole_scales(library: Native, bits: int, group: int, offsets: bool) -> None:
    """A row block that is not full, every way of multiplying, and the weight itself."""
    weight = super_block_weight(bits, (85, 768), group, offsets=offsets)
    nested, plain = CpuMatmul(library, weight), CpuMatmul(library, whole(weight))
    assert torch.equal(nested.dequantize(), dequantize(weight))
    for rows, dtype in product((1, 2, 3, 4, 5, 13, 40), (torch.bfloat16, torch.float32)):
        x = torch.randn(rows, 768, generator=torch.Generator().manual_seed(rows)).to(dtype)
        assert torch.equal(nested(x), plain(x)), (rows, dtype)


@pytest.mark.parametrize("bits, group, offsets", KINDS, ids=str)
def test_what_is_held_is_what_is_counted(library: Native, bits: int, group: int, offsets: bool) -> None:
    weight = super_block_weight(bits, (64, 512), group, offsets=offsets)
    assert CpuMatmul(library, weight).nbytes == weight.packing.bytes(64, 512)
    on_gpu = replace(weight.packing.on_gpu() or weight.packing, bits=bits, super_blocks=False)
    assert on_gpu.bytes(64, 512, 4) == whole(weight).nbytes


def test_scales_that_factors_do_not_give_are_held_whole(library: Native) -> None:
    weight = super_block_weight(4, (32, 256), 32, offsets=True)
    odd = replace(weight, scales=weight.scales * 1.001)
    x = torch.randn(3, 256).bfloat16()
    assert torch.equal(CpuMatmul(library, odd)(x), CpuMatmul(library, whole(odd))(x))


def test_a_weight_takes_the_place_of_one_alike(library: Native) -> None:
    weights = [super_block_weight(4, (32, 256), 32, offsets=True, seed=seed) for seed in range(2)]
    held, x = CpuMatmul(library, weights[0]), torch.randn(3, 256).bfloat16()
    assert held.refill(weights[1])
    assert torch.equal(held(x), CpuMatmul(library, weights[1])(x))
    assert not held.refill(whole(weights[0]))
    assert torch.equal(held(x), CpuMatmul(library, weights[1])(x))
