"""The order in which the Triton kernels store weights: the codes of one MMA thread are 16 contiguous bytes."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mycli.runtime.quantization.packed_weight import PackedWeight, unpack, widen
from mycli.runtime.quantization.scheme import INTEGER_TABLES, Packing

# The weight is the 16-row operand of `mma.m16n8k16`. A chunk is `chunk_n` rows by `chunk_k` columns, stored as `words`
# runs of 32 lanes * 16 bytes. Within a chunk
#     row    = ([repeat], field row, lane / 4)
#     column = ([32-column step], lane % 4, pair of pairs, k half, even or odd)
# and the codes that differ only in (field row, k half) share one 16-bit field; a lane has 8 such fields, whose first
# axis is the step or, where a group has only 32 columns, the repeat. The k halves are those of an MMA operand:
# columns 8 apart there, 2 apart in memory, so that a thread reads its activations as 16 contiguous bytes too. With
# groups of 16, two per step, a column is (group, lane % 4, k half, even or odd): each group is an MMA of its own.
# Rows that share a field are at different bits of it and so come out scaled by a power of two; that power depends on
# the row only, and the kernel folds it into the row's scale.

SCALES = (torch.bfloat16, torch.float16, torch.float32)  # dtypes of scales that kernels read
# A value / its unpacked number; integers that are looked up have 1.
TABLE_UNIT = {"e4m3": 2.0**8, "e5m2": 1.0, "e2m1": 2.0**14, "nf4": 1.0, "fp4": 1 / 12, "iq3_s": 2.0}
BYTE_ZERO = 128  # the byte in which a table of integers stores 0
_ROWS_AT_ONCE = 1024  # bounds the memory of the rearrangement, not its result


@dataclass(frozen=True)
class Layout:
    """Where the codes of one width are stored: `fields[row][k_half]` is (word, shift) of the code at bit 0 of a field.

    Word None is the split field of 3-bit codes: bit 15 of each of the 3 words. narrow: the step is a repeat; halved: a
    step is two groups.
    """

    bits: int
    words: int
    chunk_k: int
    fields: tuple[tuple[tuple[int | None, int], ...], ...]
    narrow: bool = False
    halved: bool = False

    @property
    def repeats(self) -> int:
        """MMA tiles of 16 rows in a chunk."""
        return len(self.fields) // 2 * (2 if self.narrow else 1)

    @property
    def chunk_n(self) -> int:
        return 16 * self.repeats


_SPLIT: tuple[None, int] = (None, 15)

_WIDE = {
    8: Layout(8, 1, 32, (((0, 0),), ((0, 8),))),
    4: Layout(4, 1, 64, (((0, 0), (0, 8)), ((0, 4), (0, 12)))),
    3: Layout(
        3,
        3,
        64,
        (
            ((0, 0), (0, 9)),
            ((1, 0), (1, 9)),
            ((2, 0), (2, 9)),
            ((0, 3), (0, 12)),
            ((1, 3), (1, 12)),
            ((2, 3), (2, 12)),
            ((0, 6), (1, 6)),
            ((2, 6), _SPLIT),
        ),
    ),
    2: Layout(2, 1, 64, tuple(((0, 2 * row), (0, 2 * row + 8)) for row in range(4))),
}


def layout_of(packing: Packing) -> Layout:
    # With groups of up to 32, chunks must not be wider than a step.
    wide = replace(_WIDE[packing.bits], halved=packing.group_size == 16)
    if packing.group_size not in (16, 32) or wide.chunk_k == 32:
        return wide
    return replace(wide, chunk_k=32, narrow=True)


def zero_code(packing: Packing) -> float | None:
    """Return the code, or the byte that is looked up, at which a value is 0; None for floats, which have no bias."""
    if packing.codes == "int":
        return 1 << (packing.bits - 1)
    if packing.codes == "iq3_s":  # the odd numbers -15, -13, .. 15: codes are unpacked like integers
        return 7.5
    return BYTE_ZERO if packing.codes in INTEGER_TABLES else None


def tile_k(packing: Packing) -> int:
    """Return the columns per dot product: a group, or 128 if a scale spans the row."""
    return packing.group_size or 128


def unpacked_k(packing: Packing) -> int:
    """Return the columns unpacked at a time: a tile, or two tiles of 16."""
    return max(32, tile_k(packing))


def padded_k(packing: Packing, in_features: int) -> int:
    """Return the stored columns: whole tiles and whole chunks."""
    multiple = max(unpacked_k(packing), layout_of(packing).chunk_k)
    return -(-in_features // multiple) * multiple


def layout_axes(layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes of (n chunk, repeat, field row, g, k chunk, step, t, pair of pairs, k half, pair), and the order."""
    repeat, step = (2, 1) if layout.narrow else (1, layout.chunk_k // 32)
    t, pairs, both = (7, 6, (2, 4)) if layout.halved else (6, 7, (4, 2))
    sizes = (-1, repeat, len(layout.fields), 8, 0, step, *both, 2, 2)
    if layout.bits == 8:  # the k half is an axis of its own: the first of the 8 fields
        return sizes, (0, 4, 2, 5, 3, t, 1, 8, pairs, 9)
    return sizes, (0, 4, 2, 8, 3, t, 1, 5, pairs, 9)


def _to_fields(codes: Tensor, layout: Layout) -> Tensor:
    """Reorder codes [rows, K] to [n chunk, k chunk, field row, k half, g, t, 8 fields]."""
    sizes, order = layout_axes(layout)
    ordered = codes.view(*sizes[:4], codes.shape[1] // layout.chunk_k, *sizes[5:]).permute(order)
    return ordered.reshape(*ordered.shape[:3], len(layout.fields[0]), 8, 4, 8)


def gpu_packing(packing: Packing) -> Packing | None:
    """Return the packing that the kernels multiply `packing` in, None if there is none; see `Packing.on_gpu`."""
    stored = packing.on_gpu()
    return stored and Packing(stored.bits, stored.group_size, offsets=stored.offsets, codes=stored.codes)


def to_gpu_packing(weight: PackedWeight) -> PackedWeight:
    """Return the same weight in the packing of `gpu_packing`."""
    packing = gpu_packing(weight.packing)
    assert packing is not None, weight.packing.name
    weight = widen(weight, packing)
    return weight if weight.scales.dtype in SCALES else replace(weight, scales=weight.scales.float())


def repack(weight: PackedWeight) -> Tensor:
    """Return the codes as int16 [ceil(N / chunk_n), K' / chunk_k, words, 256]; padding decodes to zero."""
    packing, k = weight.packing, weight.in_features
    layout, k_padded = layout_of(packing), padded_k(packing, k)
    chunks = -(-weight.out_features // layout.chunk_n)
    out = weight.packed.new_empty((chunks, k_padded // layout.chunk_k, layout.words, 256), dtype=torch.int16)
    step = _ROWS_AT_ONCE // layout.chunk_n
    for first in range(0, chunks, step):
        codes = unpack(weight.packed[first * layout.chunk_n : (first + step) * layout.chunk_n], packing.bits, k)
        fill = (0, k_padded - k, 0, -codes.shape[0] % layout.chunk_n)
        zero = 1 << (packing.bits - 1) if packing.codes == "int" else 0
        codes = _to_fields(torch.nn.functional.pad(codes, fill, value=zero), layout)
        words = codes.new_zeros((*codes.shape[:2], layout.words, 8, 4, 8), dtype=torch.int32)
        for row, halves in enumerate(layout.fields):
            for half, (word, shift) in enumerate(halves):
                value = codes[:, :, row, half].to(torch.int32)
                if word is None:
                    for bit in range(layout.words):
                        words[:, :, bit] |= (value >> bit & 1) << shift
                else:
                    words[:, :, word] |= value << shift
        # The low 16 bits as a signed number, so that the conversion cannot overflow.
        out[first : first + step] = (words - ((words >> 15) << 16)).to(torch.int16).flatten(3)
    return out


def repack_scales(weight: PackedWeight, scales: Tensor) -> Tensor:
    """Return scales or offsets as [K' / tile, N'], N' the padded rows, or [1, N'] per channel; zeros in the padding.

    16-bit scales are int32 [.., N' / 2]: the rows r and r + 8 of an MMA register pair in one word, r low.
    """
    packing = weight.packing
    groups = padded_k(packing, weight.in_features) // packing.group_size if packing.group_size else 1
    fill = (0, groups - scales.shape[1], 0, -scales.shape[0] % layout_of(packing).chunk_n)
    padded = torch.nn.functional.pad(scales, fill).t().contiguous()
    if scales.element_size() == 4:
        return padded
    paired = padded.view(groups, -1, 2, 8).transpose(2, 3).contiguous()
    return paired.view(groups, -1).view(torch.int32)
