"""Chooses whether `quantize` stores an untied output head in 8 bits: if that costs little, by measurement."""

from dataclasses import dataclass

from mycli.runtime.quantization.activations import MAX_ADDED_KL
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class HeadKl:
    """Mean KL from the original model with the original head, and with the head in 8 bits."""

    keep: float
    int8: float

    @property
    def record(self) -> dict[str, float | str]:
        return {"keep": self.keep, "int8": self.int8, "chosen": "int8" if self.packed else "keep"}

    @property
    def added(self) -> float:
        return (self.int8 - self.keep) / self.keep if self.keep > 0 else 0.0

    @property
    def packed(self) -> bool:
        """Whether the head is stored in 8 bits."""
        return self.added < MAX_ADDED_KL


def read_head_kl(record: Fields | None) -> HeadKl | None:
    """Return what mycli.json says about the head; None if it was not measured. Raises ModelError for invalid values."""
    if record is None or not record.has("card") or not record.object("card").has("head"):
        return None
    measured = record.object("card").object("head")
    return HeadKl(measured.number("keep", low=-1e-3), measured.number("int8", low=-1e-3))
