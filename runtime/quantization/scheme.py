"""A number format of weights: bits, groups and scales, its sizes and its name.

Knows sizes, not bits: the codes themselves are in `runtime.quantization.packed_weight`, and how a folder describes and
stores them in `runtime.checkpoint.formats`. Does not import torch.
"""

import re
from dataclasses import dataclass

from mycli.runtime.errors import ModelError, UsageError

BITS = (8, 4, 3, 2)
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Packing:
    """An integer grid of `bits` bits with one signed scale per `group_size` inputs (None: per output row).

    Symmetric, or with an offset beside each scale; see `PackedWeight`.
    """

    bits: int
    group_size: int | None
    layout: str = "compressed_tensors"  # which of `checkpoint.formats` its tensors lie in
    offsets: bool = False

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
        """int32 words per output row of `weight_packed`."""
        return (in_features * self.bits + 31) // 32

    def bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        """Bytes of `weight_packed` and `weight_scale` together, without the 16 of `weight_shape`."""
        return out_features * (4 * self.words(in_features) + scale_bytes * self.groups(in_features))

    @property
    def name(self) -> str:
        """As in model names: int4-g128, int8-channel."""
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"int{self.bits}-{group}" + ("-offset" if self.offsets else "")


def parse_packing(name: str) -> Packing:
    """The inverse of `Packing.name`; the method in front of a model's name (gptq-int4-g128) is allowed.

    Raises UsageError listing what exists.
    """
    match = re.fullmatch(r"(?:[a-z]+-)?int([2348])(?:-(?:g(32|64|128)|channel))?", name)
    if not match:
        raise UsageError(
            f"{name}: not a quantization scheme",
            "bits 8, 4, 3 or 2, and a group of 32, 64, 128 or channel: int4-g128, int8-channel",
        )
    bits, group, channel = int(match[1]), match[2], name.endswith("-channel")
    return Packing(bits, None if channel else int(group or 128))
