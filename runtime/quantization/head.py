"""Decides whether an untied output head is stored in 8 bits: if its measured cost is small."""

from dataclasses import dataclass

from mycli.runtime.quantization.activations import MAX_ADDED_KL, added_share, read_card_kl
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
        return added_share(self.keep, self.int8)

    @property
    def packed(self) -> bool:
        return self.added < MAX_ADDED_KL


def read_head_kl(record: Fields | None) -> HeadKl | None:
    """Return what mycli.json says about the head; None if it was not measured. Raises ModelError for invalid values."""
    measured = read_card_kl(record, "head", "keep", "int8")
    return None if measured is None else HeadKl(*measured)
