"""A number format of weights: bits, groups and scales, its sizes and its name.

Knows sizes, not bits: the codes themselves are in `runtime.quantization.packed_weight`, what they stand for in
`runtime.quantization.codes`, and how a folder describes and stores them in `runtime.checkpoint.formats`. Does not
import torch.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.utils.dtypes import BY_NAME, Dtype

BITS = (8, 4, 3, 2)  # that quantizing writes; 5, 6 and 7 are read
GROUP_SIZES = (32, 64, 128)
NF4_GROUP = 64  # of QLoRA
OWN_LAYOUT = "compressed_tensors"  # of `checkpoint.formats`, that quantizing writes
NF4_LAYOUT = "bitsandbytes"  # the other one that it writes
# What a code stands for: a signed integer, or an entry of a table: of 8-bit floats, of E2M1 (the FP4 of OCP's MX and of
# NVIDIA), of QLoRA's NF4, of bitsandbytes' FP4.
Codes = Literal["int", "e4m3", "e5m2", "e2m1", "nf4", "fp4"]
_OFFSET_BYTES, _INDEX_BYTES = 4, 4
SUPER_BLOCK = 256  # inputs of a row that share the factors of their scales
_FACTOR_BYTES = 2  # fp16


@dataclass(frozen=True)
class Packing:
    """Codes of `bits` bits with one signed scale per `group_size` inputs (None: per output row); see `PackedWeight`.

    `codes`: what they stand for; `offsets`: an offset beside each scale; `permuted`: the columns are stored sorted by
    group, with the input that each of them takes. `scale_dtype` of the scales in memory; None: the model's.
    `super_blocks`: scales, and offsets beside them, are of a byte each times fp16 factors of `SUPER_BLOCK` inputs, and
    may be held so.
    """

    bits: int
    group_size: int | None
    layout: str = OWN_LAYOUT  # which of `checkpoint.formats` its tensors lie in
    offsets: bool = False
    codes: Codes = "int"
    scale_dtype: Dtype | None = None
    permuted: bool = False
    super_blocks: bool = False
    dialect: tuple[str | int, ...] = ()  # what else its layout has to know; nobody else reads it

    @property
    def plain(self) -> bool:
        """Whether it is one that quantizing writes, which every kernel takes."""
        group = self.group_size is None or self.group_size in GROUP_SIZES
        return self.codes == "int" and self.bits in BITS and group and not self.offsets

    def on_gpu(self) -> "Packing | None":
        """As kernels on a GPU hold the same numbers: codes of 5 to 7 bits in a byte, large groups as several, each
        scale by itself.

        None where they do not multiply it: a group that is no multiple of 16 would end within one of their steps.
        """
        group = self.group_size
        fitting = [size for size in sorted((16, *GROUP_SIZES), reverse=True) if group and group % size == 0]
        if group is not None and not fitting:
            return None
        bits = self.bits if self.bits in BITS else 8
        return replace(self, bits=bits, group_size=fitting[0] if fitting else None, super_blocks=False)

    def groups(self, in_features: int) -> int:
        """Scales per output row. Raises ModelError where the group size does not divide `in_features`."""
        if self.group_size is None:
            return 1
        if in_features % self.group_size:
            raise ModelError(
                f"group size {self.group_size} does not divide {in_features} input features",
                "choose another group size, or channel",
            )
        return in_features // self.group_size

    def words(self, in_features: int) -> int:
        """int32 words per output row of codes."""
        return (in_features * self.bits + 31) // 32

    def bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        """Bytes of a weight in memory: words, scales of `scale_bytes` unless their dtype is known, offsets, order."""
        scale = scale_bytes if self.scale_dtype is None else BY_NAME[self.scale_dtype].nbytes
        group = scale + (_OFFSET_BYTES if self.offsets else 0)
        scales = group * self.groups(in_features)
        if self.super_blocks:
            scales = (1 + self.offsets) * (self.groups(in_features) + _FACTOR_BYTES * (in_features // SUPER_BLOCK))
        order = _INDEX_BYTES * in_features if self.permuted else 0
        return out_features * (4 * self.words(in_features) + scales) + order

    @property
    def name(self) -> str:
        """As in model names: int4-g128, int8-channel; of what others write also int4-g64-offset, e4m3-g128, nf4-g64."""
        kind = f"int{self.bits}" if self.codes == "int" else self.codes
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"{kind}-{group}" + ("-offset" if self.offsets else "") + ("-permuted" if self.permuted else "")


def parse_packing(name: str) -> Packing:
    """The inverse of `Packing.name` for what quantizing writes; a method in front (gptq-int4-g128) is allowed.

    Raises UsageError listing what exists.
    """
    match = re.fullmatch(r"(?:[a-z]+-)?int([2348])(?:-(?:g(32|64|128)|channel))?", name)
    if not match:
        table = re.fullmatch(r"nf4(?:-g(32|64|128))?", name)
        if table:
            return Packing(4, int(table[1] or NF4_GROUP), NF4_LAYOUT, codes="nf4", scale_dtype="float32")
        raise UsageError(
            f"{name}: not a quantization scheme",
            "bits 8, 4, 3 or 2, and a group of 32, 64, 128 or channel: int4-g128, int8-channel; or nf4-g64",
        )
    bits, group, channel = int(match[1]), match[2], name.endswith("-channel")
    return Packing(bits, None if channel else int(group or 128))
