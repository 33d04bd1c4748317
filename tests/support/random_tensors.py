"""Builds random tensors for kernel tests on torch's default device; MYCLI_TEST_SEED changes their seeds.

Thus a test uses fixed numbers in the interpreter and fresh ones on a GPU.
"""

import os

import torch
from torch import Tensor

from mycli.runtime.quantization.packed_weight import PackedWeight, pack
from mycli.runtime.quantization.scheme import Packing


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(int(os.environ.get("MYCLI_TEST_SEED", 0)) + seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), device="cpu").to(torch.get_default_device())


def permutation(count: int, seed: int = 0) -> Tensor:
    """Return the numbers below `count` in a random order that is the same in every run."""
    # Drawn on the CPU: a CPU generator draws on no other device.
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device())


def codes(bits: int, *shape: int, seed: int = 0) -> Tensor:
    drawn = torch.randint(0, 1 << bits, shape, generator=generator(seed), device="cpu", dtype=torch.uint8)
    return drawn.to(torch.get_default_device())


def weight(packing: Packing, rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float16) -> PackedWeight:
    """Return random codes and scales of `dtype` for a weight [rows, columns]."""
    drawn = codes(packing.bits, rows, columns, seed=seed)
    if packing.codes in ("e4m3", "e5m2"):
        drawn &= 0xBB if packing.codes == "e5m2" else 0xF7  # excludes NaN and infinity
    scales = normal(rows, packing.groups(columns), seed=seed + 1).to(dtype)
    offsets = normal(rows, packing.groups(columns), seed=seed + 2) if packing.offsets else None
    return PackedWeight(pack(drawn, packing.bits), scales, packing, columns, offsets)
