"""Chooses the bits of the integers to which CPU kernels round bf16 activations: 16, or 8 where that costs little."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mycli.runtime.errors import Declined
from mycli.runtime.quantization.scheme import ActivationBits, Packing
from mycli.runtime.utils.json_fields import Fields

# 8 bits take half the arithmetic. `quantize` measures their cost, and the model's card says it.
Activations = Literal["auto", "8", "16"]
# "auto" uses 8 bits next to weights of at most this width, whose own error hides that of the activations: next to 8-bit
# weights it would be the larger one.
WIDEST = 6
MAX_ADDED_KL = 0.03  # of the KL divergence, for "auto"
# Mean KL from 16 to 8 bits, for "auto" with a file that has no card. The formats of GGUF are made for 8-bit activations
# of 32 to 256 inputs, so 8 bits are used with all their widths.
MAX_MOVED_KL = 0.001


@dataclass(frozen=True)
class ActivationKl:
    """Mean KL from the original model in bf16, with activations of 16 and of 8 bits."""

    sixteen: float
    eight: float

    @property
    def record(self) -> dict[str, float]:
        return {"16": self.sixteen, "8": self.eight}

    @property
    def added(self) -> float:
        return added_share(self.sixteen, self.eight)


def added_share(before: float, after: float) -> float:
    """Return by which share of itself a mean KL grows."""
    return (after - before) / before if before > 0 else 0.0


def read_card_kl(record: Fields | None, part: str, *names: str) -> tuple[float, ...] | None:
    """Return the mean KLs `names` of a part of mycli.json's card; None without it. Raises ModelError for bad values."""
    if record is None or not record.has("card") or not record.object("card").has(part):
        return None
    measured = record.object("card").object(part)
    return tuple(measured.number(name, low=-1e-3) for name in names)


def read_activation_kl(record: Fields | None) -> ActivationKl | None:
    """Return what mycli.json says about both; None if it was not measured. Raises ModelError for invalid values."""
    measured = read_card_kl(record, "activations", "16", "8")
    return None if measured is None else ActivationKl(*measured)


@dataclass(frozen=True)
class ActivationChoice:
    """How CPU kernels round activations."""

    bits: ActivationBits
    widest: int  # weights that are multiplied by them; wider ones by 16 bits
    reason: Declined

    def packings(self, packings: Mapping[str, Packing]) -> Mapping[str, Packing]:
        if self.bits == 16:
            return packings
        return {
            name: replace(packing, activations=self.bits) if packing.bits <= self.widest else packing
            for name, packing in packings.items()
        }


def choose_activations(requested: Activations, measured: ActivationKl | None, *, tiles: bool) -> ActivationChoice:
    """Return the choice for bf16 activations on a CPU; `tiles`: it multiplies integers in AMX tiles."""
    if requested != "auto":
        return ActivationChoice(8 if requested == "8" else 16, 8, Declined("activations-requested"))
    if measured is None:
        return ActivationChoice(16, WIDEST, Declined("activations-not-measured"))
    reason = Declined("activations-add", {"added": measured.added, "most": MAX_ADDED_KL})
    if measured.added >= MAX_ADDED_KL:
        return ActivationChoice(16, WIDEST, reason)
    if tiles:  # a tile holds 64 inputs: segments of 32 would leave half of it empty
        return ActivationChoice(16, WIDEST, Declined("activations-in-tiles"))
    return ActivationChoice(8, WIDEST, reason)


UNMEASURED_FILE = ActivationChoice(16, 8, Declined("activations-file-not-measured"))


def choose_by_file(moved: float | None) -> ActivationChoice:
    """Return the choice for a file without a card; moved: its measured KL divergence from 16 to 8 bits, if known."""
    if moved is None:
        return UNMEASURED_FILE
    reason = Declined("activations-move", {"moved": moved, "most": MAX_MOVED_KL})
    return ActivationChoice(8 if moved < MAX_MOVED_KL else 16, 8, reason)
