"""Decodes the blocks of ggml's quantized types, laid out as in ggml-common.h, to values or to packed weights.

Every type becomes levels, scales and minima, multiplied in the order of ggml's own reference: values are equal bit for
bit. Plain torch; runs once, at load.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mycli.runtime.checkpoint.gguf import codebooks
from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME, GgmlType
from mycli.runtime.errors import ModelError
from mycli.runtime.quantization.codes import code_table
from mycli.runtime.quantization.packed_weight import PackedWeight, pack, unpack
from mycli.runtime.quantization.scheme import SCALE_UNITS


@dataclass(frozen=True)
class Groups:
    """The parts of n blocks: weight = scale * level + minimum, or scale * table[level] + minimum.

    levels: int8 [n, block]; scales, minima: fp32 [n, block / group]. factors: fp16 [n, 1 or 2], only of super-blocks,
    whose scales (and minima) are integers times the first (and second) factor. table: [2^bits].
    """

    levels: Tensor
    scales: Tensor
    minima: Tensor | None = None
    factors: Tensor | None = None
    table: Tensor | None = None

    def values(self) -> Tensor:
        blocks, groups = self.scales.shape
        levels = self.levels if self.table is None else self.table[self.levels.int()]
        weights = levels.view(blocks, groups, -1) * self.scales.unsqueeze(-1)
        if self.minima is not None:
            weights = weights + self.minima.unsqueeze(-1)
        return weights.view(blocks, -1)


def _half(data: Tensor) -> Tensor:
    return _halves(data).float()


def _halves(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16)


# uint8 [n, bytes] to [n, values]: of each run of bytes first all at the first shift, then all at the second.
def _split(data: Tensor, shifts: tuple[int, ...], run: int = 32) -> Tensor:
    shift = torch.tensor(shifts, dtype=torch.uint8).view(1, 1, -1, 1)
    return (data.reshape(len(data), -1, 1, run) >> shift).reshape(len(data), -1)


def _nibbles(data: Tensor, run: int = 32) -> Tensor:
    return _split(data, (0, 4), run) & 15


# uint8 [n, bytes] to [n, 8 * bytes], the lowest bit of each byte first.
def _bits(data: Tensor) -> Tensor:
    return (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)).reshape(len(data), -1) & 1


def _q4_0(x: Tensor) -> Groups:
    return Groups(_nibbles(x[:, 2:], 16).to(torch.int8) - 8, _half(x[:, :2]))


def _q4_1(x: Tensor) -> Groups:
    return Groups(_nibbles(x[:, 4:], 16).to(torch.int8), _half(x[:, :2]), _half(x[:, 2:4]))


def _q5_0(x: Tensor) -> Groups:
    levels = _nibbles(x[:, 6:], 16) | _bits(x[:, 2:6]) << 4
    return Groups(levels.to(torch.int8) - 16, _half(x[:, :2]))


def _q5_1(x: Tensor) -> Groups:
    levels = _nibbles(x[:, 8:], 16) | _bits(x[:, 4:8]) << 4
    return Groups(levels.to(torch.int8), _half(x[:, :2]), _half(x[:, 2:4]))


def _q8_0(x: Tensor) -> Groups:
    return Groups(x[:, 2:].contiguous().view(torch.int8), _half(x[:, :2]))


def _super_block(levels: Tensor, scales: Tensor, factors: Tensor, minima: Tensor | None = None) -> Groups:
    unit = factors.float()
    subtracted = None if minima is None else -(unit[:, 1:] * minima)
    return Groups(levels.to(torch.int8), unit[:, :1] * scales, subtracted, factors)


def _q2_k(x: Tensor) -> Groups:
    scales = x[:, :16]
    levels = _split(x[:, 16:80], (0, 2, 4, 6)) & 3
    return _super_block(levels, scales & 15, _halves(x[:, 80:84]), scales >> 4)


def _q3_k(x: Tensor) -> Groups:
    low, high = _split(x[:, 96:104], (0, 4), 8) & 15, _split(x[:, 104:108], (0, 2, 4, 6), 4) & 3
    scales = (low | high << 4).to(torch.int8) - 32
    levels = (_split(x[:, 32:96], (0, 2, 4, 6)) & 3) | (_split(x[:, :32], tuple(range(8))) & 1) << 2
    return _super_block(levels.to(torch.int8) - 4, scales, _halves(x[:, 108:110]))


# The 12 bytes of Q4_K and Q5_K: eight scales and eight minima of 6 bits, [n, 8] each.
def _scales_and_minima(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second, rest = x[:, :4], x[:, 4:8], x[:, 8:]
    scales = torch.cat([first & 63, rest & 15 | first >> 2 & 48], dim=1)
    minima = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], dim=1)
    return scales, minima


def _q4_k(x: Tensor) -> Groups:
    scales, minima = _scales_and_minima(x[:, 4:16])
    return _super_block(_nibbles(x[:, 16:]), scales, _halves(x[:, :4]), minima)


def _q5_k(x: Tensor) -> Groups:
    scales, minima = _scales_and_minima(x[:, 4:16])
    levels = _nibbles(x[:, 48:]) | (_split(x[:, 16:48], tuple(range(8))) & 1) << 4
    return _super_block(levels, scales, _halves(x[:, :4]), minima)


def _q6_k(x: Tensor) -> Groups:
    levels = _nibbles(x[:, :128], 64) | (_split(x[:, 128:192], (0, 2, 4, 6)) & 3) << 4
    scales = x[:, 192:208].contiguous().view(torch.int8)
    return _super_block(levels.to(torch.int8) - 32, scales, _halves(x[:, 208:210]))


def _q1_0(x: Tensor) -> Groups:
    return Groups(2 * _bits(x[:, 2:]).to(torch.int8) - 1, _half(x[:, :2]))


def _q2_0(x: Tensor) -> Groups:
    # Levels -1 to 2: those of 0 to 3, less one scale.
    levels = (x[:, 2:].unsqueeze(-1) >> torch.arange(0, 8, 2, dtype=torch.uint8)).reshape(len(x), -1) & 3
    scales = _half(x[:, :2])
    return Groups(levels.to(torch.int8), scales, -scales)


_READERS: Mapping[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
}


def read_groups(data: Tensor, kind: GgmlType) -> Groups:
    """Split blocks, uint8 [n, kind.nbytes], into levels, scales and minima."""
    if kind.name in _READERS:
        return _READERS[kind.name](data)
    table = None
    if kind.codes != "int":
        table = torch.tensor(codebooks.FP4) if kind.codes == "e2m1" else code_table(kind.packing)
    if kind.name in codebooks.READERS:
        return Groups(*codebooks.READERS[kind.name](data), table=table)
    codes, multiples, factors = codebooks.NESTED_READERS[kind.name](data)
    unit = factors.float() * SCALE_UNITS.get(kind.codes, 1.0)
    return Groups(codes, unit * multiples, factors=factors, table=table)


def dequantize_blocks(data: Tensor, name: str) -> Tensor:
    """Decode rows of blocks, uint8 [rows, bytes], of the ggml type `name` to fp32 [rows, columns]."""
    kind = TYPES_BY_NAME[name]
    if kind.dtype is not None:
        return data.contiguous().view(getattr(torch, kind.dtype)).float()
    return read_groups(data.reshape(-1, kind.nbytes), kind).values().view(len(data), -1)


def pack_rows(data: Tensor, kind: GgmlType, columns: Tensor | None = None) -> PackedWeight:
    """Repack rows of blocks, uint8 [rows, bytes], as groups that kernels multiply; scales and offsets fp32.

    columns: int64 [columns], the place in the row of each column; whole groups change places. Raises ModelError for
    levels outside the type's range, and for columns that leave a group.
    """
    packing = kind.packing
    if columns is not None:
        packing, whole = replace(packing, byte_scales=None), pack_rows(data, kind)
        return reorder_columns(replace(whole, packing=packing), columns)
    groups = read_groups(data.reshape(-1, kind.nbytes), kind)
    half = 1 << (packing.bits - 1)
    codes = groups.levels.to(torch.int16) + (0 if kind.minimum or groups.table is not None else half)
    if int(codes.max()) >= 2 * half or int(codes.min()) < 0:
        raise ModelError(f"a block of {kind.name} holds a level outside the range of the type", code="pull-again")
    width = data.shape[1] // kind.nbytes * kind.block
    # Kernels take groups of at most 128: a wider group becomes several with the same scale.
    repeat = kind.group // (packing.group_size or kind.group)
    scales = groups.scales.view(len(data), -1).repeat_interleave(repeat, dim=1)
    if packing.codes == "e2m1":  # whose codes have half of ggml's values
        scales = scales * 2
    packed = pack(codes.to(torch.uint8).view(len(data), width), packing.bits)
    factors = None if groups.factors is None else groups.factors.view(len(data), -1, groups.factors.shape[1])
    weight = PackedWeight(packed, scales, packing, width, factors=factors)
    if groups.minima is None:
        return weight
    # Levels of types with minima count from zero, codes from half their range. The offset holds both: one rounding of
    # fp32, the only one here.
    minima = groups.minima.view(len(data), -1)
    # Where all levels are zero the scale has no meaning, but a large one would round the minimum away.
    scales = torch.where(codes.view(*scales.shape, -1).any(dim=-1), scales, 0.0)
    return replace(weight, scales=scales, offsets=minima + half * scales)


def reorder_columns(weight: PackedWeight, columns: Tensor) -> PackedWeight:
    """Return the weight with its columns in the order `columns`, int64. Raises ModelError if that divides a group."""
    packing = weight.packing
    group = packing.group_size
    assert group is not None
    places = columns.view(-1, group)
    first = places[:, 0]
    if not torch.equal(places, first.unsqueeze(1) + torch.arange(group)) or bool((first % group).any()):
        raise ModelError(f"heads do not end where groups of {group} weights end, which is not supported", "")
    codes = unpack(weight.packed, packing.bits, len(columns))[:, columns]
    offsets = None if weight.offsets is None else weight.offsets[:, first // group]
    scales = weight.scales[:, first // group]
    return PackedWeight(pack(codes, packing.bits), scales, packing, len(columns), offsets=offsets)
