"""Builds random packed weights for tests of matrix products."""

import torch
from torch import Tensor

from mycli.runtime.checkpoint.formats._parts import row_factors
from mycli.runtime.quantization.packed_weight import PackedWeight, pack
from mycli.runtime.quantization.scheme import INTEGER_TABLES, SUPER_BLOCK, ByteScales, Codes, Packing


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
    packing = Packing(bits, group, offsets=offsets, byte_scales="super_blocks")
    return PackedWeight(pack(codes, bits), scales, packing, columns, beside, factors=factors)


def byte_scale_weight(
    kind: ByteScales, shape: tuple[int, int], group: int, *, factor: Tensor | None = None, seed: int = 0
) -> PackedWeight:
    """Return random E2M1 codes with scales of E4M3 times `factor` (a scalar in fp64), or of E8M0 in bf16."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
    groups = shape[0], shape[1] // group
    packing = Packing(4, group, codes="e2m1", byte_scales=kind)
    if kind == "e8m0":
        scales = torch.exp2(torch.randint(-20, 4, groups, generator=generator).float()).bfloat16()
        return PackedWeight(pack(codes, 4), scales, packing, shape[1])
    factor = torch.tensor(0.001, dtype=torch.float64) if factor is None else factor
    numbers = torch.randint(0, 127, groups, generator=generator).to(torch.uint8).view(torch.float8_e4m3fn)
    scales = (numbers.double() * factor).float()
    return PackedWeight(pack(codes, 4), scales, packing, shape[1], factors=row_factors(factor, shape[0]))
