"""Builds random packed weights for tests of matrix products."""

import torch

from mycli.runtime.quantization.packed_weight import PackedWeight, pack
from mycli.runtime.quantization.scheme import INTEGER_TABLES, SUPER_BLOCK, Codes, Packing


def code_bits(codes: Codes) -> int:
    """Return the bits of the codes of a table."""
    values = INTEGER_TABLES.get(codes, range(256 if codes in ("e4m3", "e5m2") else 16))
    return (len(values) - 1).bit_length()


def super_block_weight(
    bits: int, shape: tuple[int, int], group: int, *, offsets: bool, seed: int = 0, size: float = 0.001
) -> PackedWeight:
    """Return random codes with integer scales (and offsets), some zero, times factors of about `size`."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape
    codes = torch.randint(0, 1 << bits, shape, generator=generator).to(torch.uint8)
    factors = (torch.randn(rows, columns // SUPER_BLOCK, 1 + offsets, generator=generator) * size).half()
    each = factors.float().repeat_interleave(SUPER_BLOCK // group, dim=1)
    low, high = (0, 64) if offsets else (-128, 128)
    scales = torch.randint(low, high, each.shape[:2], generator=generator) * each[..., 0]
    beside = None
    if offsets:
        subtracted = torch.randint(0, 64, each.shape[:2], generator=generator) * each[..., 1]
        beside = scales * (1 << (bits - 1)) - subtracted
    packing = Packing(bits, group, offsets=offsets, super_blocks=True)
    return PackedWeight(pack(codes, bits), scales, packing, columns, beside, factors=factors)
