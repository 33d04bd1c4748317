"""`Packing`, the number format of quantized weights: bits, groups and scales, its sizes and its name; without torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Literal

from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.utils.dtypes import BY_NAME, Dtype

BITS = (8, 4, 3, 2)  # written by `quant`; 5, 6 and 7 bits are only read
GROUP_SIZES = (32, 64, 128)
NF4_GROUP = 64  # QLoRA's
# The layouts of `checkpoint.formats` that `quant` writes.
OWN_LAYOUT = "compressed_tensors"
NF4_LAYOUT = "bitsandbytes"
# The kind of codes: signed integers, or a table: 8-bit floats, E2M1 (the FP4 of OCP's MX and of NVIDIA), QLoRA's NF4,
# bitsandbytes' FP4, or one of `INTEGER_TABLES`.
Codes = Literal["int", "e4m3", "e5m2", "e2m1", "nf4", "fp4", "iq4", "iq3_xxs", "iq3_s", "iq2", "iq1"]
# The integers of which ggml's codebook types consist, in ascending order. In symmetric tables the complement of a code
# has the negative value. Those of three bits have six integers; the first and the last are there twice.
INTEGER_TABLES: Mapping[Codes, tuple[int, ...]] = {
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "iq3_xxs": (-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62),
    "iq3_s": tuple(range(-15, 16, 2)),
    "iq2": (-43, -43, -25, -8, 8, 25, 43, 43),
    "iq1": (-9, -9, -7, -1, 1, 7, 9, 9),
}
# What the scales of super-blocks are integers of, in factors: 1 if absent.
SCALE_UNITS: Mapping[Codes, float] = {"iq3_xxs": 0.25, "iq2": 0.125, "iq1": 0.125}
ActivationBits = Literal[8, 16]
# How CPU kernels hold scales that take a byte each: integers with fp16 factors of `SUPER_BLOCK` inputs, offsets too;
# E4M3 with a pair of fp32 factors of a row, whose sum is the factor of NVFP4; or E8M0.
ByteScales = Literal["super_blocks", "e4m3", "e8m0"]
_OFFSET_BYTES, _INDEX_BYTES = 4, 4
SUPER_BLOCK = 256  # inputs of a row that share the factors of their scales
_FACTOR_BYTES = 2  # fp16, of a super-block
_ROW_FACTOR_BYTES = 8


@dataclass(frozen=True)
class Packing:
    """Codes with a signed scale per group of inputs; see `PackedWeight`."""

    bits: int
    group_size: int | None  # inputs that share a scale; None: all of an output row
    layout: str = OWN_LAYOUT  # the module of `checkpoint.formats` that reads its tensors
    offsets: bool = False  # each scale has an offset
    codes: Codes = "int"
    scale_dtype: Dtype | None = None  # of the scales in memory; None: the model's
    permuted: bool = False  # columns are stored sorted by group, with the index of their input
    byte_scales: ByteScales | None = None
    dialect: tuple[str | int, ...] = ()  # private to its layout
    # Bits of the integers that CPU kernels round bf16 activations to. Not compared: it is not part of what is stored.
    activations: ActivationBits = field(default=16, compare=False)

    @property
    def plain(self) -> bool:
        """Whether `quant` writes it as integers, which every kernel supports."""
        group = self.group_size is None or self.group_size in GROUP_SIZES
        return self.codes == "int" and self.bits in BITS and group and not self.offsets

    def as_integers(self) -> "Packing":
        """Return the packing of the same weights as int8 if its table holds integers, else itself."""
        return replace(self, bits=8, codes="int") if self.codes in INTEGER_TABLES else self

    def on_gpu(self) -> "Packing | None":
        """Return the packing in which GPU kernels store the same weights, or None if they do not support it."""
        # Codes of 5 to 7 bits take a byte and those of tables of 8 integers half a byte, large groups are split, and
        # scales of a byte are expanded. A group that is not a multiple of 16 would end inside a step of the
        # kernels.
        group = self.group_size
        fitting = [size for size in sorted((16, *GROUP_SIZES), reverse=True) if group and group % size == 0]
        if group is not None and not fitting:
            return None
        bits = 4 if self.codes in INTEGER_TABLES else self.bits if self.bits in BITS else 8
        return replace(self, bits=bits, group_size=fitting[0] if fitting else None, byte_scales=None)

    def groups(self, in_features: int) -> int:
        """Return the scales per output row. Raises ModelError if the group size does not divide `in_features`."""
        if self.group_size is None:
            return 1
        if in_features % self.group_size:
            raise ModelError(
                f"group size {self.group_size} does not divide {in_features} input features",
                "choose another group size, or channel",
            )
        return in_features // self.group_size

    def words(self, in_features: int) -> int:
        """Return the int32 words of an output row of codes."""
        return (in_features * self.bits + 31) // 32

    def bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        """Return the bytes of a weight in memory; scales take `scale_bytes` unless the packing has a dtype for them."""
        scale = scale_bytes if self.scale_dtype is None else BY_NAME[self.scale_dtype].nbytes
        group = scale + (_OFFSET_BYTES if self.offsets else 0)
        scales = group * self.groups(in_features)
        if self.byte_scales is not None:
            factors = {
                "super_blocks": _FACTOR_BYTES * (in_features // SUPER_BLOCK),
                "e4m3": _ROW_FACTOR_BYTES,
                "e8m0": 0,
            }
            scales = (1 + self.offsets) * (self.groups(in_features) + factors[self.byte_scales])
        order = _INDEX_BYTES * in_features if self.permuted else 0
        return out_features * (4 * self.words(in_features) + scales) + order

    @property
    def name(self) -> str:
        """The name used in model names: int4-g128, int8-channel, nf4-g64, int4-g64-offset, e4m3-g128."""
        kind = f"int{self.bits}" if self.codes == "int" else self.codes
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"{kind}-{group}" + ("-offset" if self.offsets else "") + ("-permuted" if self.permuted else "")


def stacked_packing(packings: Sequence[Packing | None]) -> Packing | None:
    """Return the packing of integers that holds weights of several packings exactly, or None if there is none."""
    # At least 4 bits: with offsets in groups of 16, GPU kernels of 3 bits need more registers than there are.
    stored = [packing.as_integers() for packing in packings if packing is not None]
    if len(set(packings)) == 1 or len(stored) < len(packings):
        return None
    if any(packing.codes != "int" or packing.permuted for packing in stored):
        return None
    groups = [packing.group_size for packing in stored if packing.group_size is not None]
    dtypes = {packing.scale_dtype for packing in stored}
    return Packing(
        max(4, *(packing.bits for packing in stored)),
        gcd(*groups) if groups else None,
        offsets=any(packing.offsets for packing in stored),
        scale_dtype=dtypes.pop() if len(dtypes) == 1 else "float32",
    )


def parse_packing(name: str) -> Packing:
    """Parse a `Packing.name` that `quant` writes, also with a method in front (gptq-int4-g128). Raises UsageError."""
    match = re.fullmatch(r"(?:[a-z]+-)?int([2348])(?:-(?:g(32|64|128)|channel))?", name)
    if not match:
        table = re.fullmatch(r"nf4(?:-g(32|64|128))?", name)
        if table:
            return Packing(4, int(table[1] or NF4_GROUP), NF4_LAYOUT, codes="nf4", scale_dtype="float32")
        raise UsageError(
            f"unknown quantization scheme {name!r}",
            "choose 8, 4, 3 or 2 bits and a group of 32, 64, 128 or channel: int4-g128, int8-channel; or nf4-g64",
        )
    bits, group, channel = int(match[1]), match[2], name.endswith("-channel")
    return Packing(bits, None if channel else int(group or 128))
