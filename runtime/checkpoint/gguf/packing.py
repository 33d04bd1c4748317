"""Blocks of ggml as packed groups: the same values in the layout that kernels multiply.

A level of b bits becomes a code of b bits, and what a block adds to its levels the group's offset. Levels of types with
minimums count from zero, codes from half their range: the offset is both together, in one rounding of fp32. Everything
else is exact.
"""

from dataclasses import replace

import torch
from torch import Tensor

from mycli.runtime.checkpoint.gguf.blocks import read_groups
from mycli.runtime.checkpoint.gguf.types import GgmlType
from mycli.runtime.errors import ModelError
from mycli.runtime.quantization.packed_weight import PackedWeight, pack


def pack_rows(data: Tensor, kind: GgmlType) -> PackedWeight:
    """Rows of blocks, uint8 [rows, bytes], as a packed weight; scales and offsets fp32.

    Raises ModelError for levels that the type cannot have.
    """
    packing = kind.packing
    groups = read_groups(data.reshape(-1, kind.nbytes), kind)
    half = 1 << (packing.bits - 1)
    codes = groups.levels.to(torch.int16) + (0 if kind.minimum else half)
    if int(codes.max()) >= 2 * half or int(codes.min()) < 0:
        raise ModelError(f"a block of {kind.name} holds a level that the type does not have", code="pull-again")
    columns = data.shape[1] // kind.nbytes * kind.block
    repeat = kind.group // (packing.group_size or kind.group)  # a group wider than kernels take is several alike
    scales = groups.scales.view(len(data), -1).repeat_interleave(repeat, dim=1)
    packed = pack(codes.to(torch.uint8).view(len(data), columns), packing.bits)
    factors = None if groups.factors is None else groups.factors.view(len(data), -1, groups.factors.shape[1])
    weight = PackedWeight(packed, scales, packing, columns, factors=factors)
    if groups.minima is None:
        return weight
    minima = groups.minima.view(len(data), -1)
    return replace(weight, offsets=minima + half * scales)
