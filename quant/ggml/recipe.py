"""The recipe of a GGUF file. Imports no torch."""

from dataclasses import asdict, dataclass
from typing import Any

from mycli.quant.ggml.mixes import load_mix


@dataclass(frozen=True)
class GgufRecipe:
    """Everything that determines the bytes of a GGUF file, except the source and the user's calibration text.

    mix: a file type of `mixes`; target_size: maximum size of the file in bytes; kinds: with a target size, the type of
    each linear as chosen by `sensitivity`, which replaces the type of the mix. The other fields are those of
    `quant.recipe.Recipe`.
    """

    mix: str
    samples: int = 128
    seq: int | None = None
    seed: int = 0
    target_size: int | None = None
    kinds: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        load_mix(self.mix)

    @property
    def name(self) -> str:
        """Return the part of the file's name that describes the recipe."""
        return self.mix if self.target_size is None else f"{self.target_size / 2**30:.3g}GiB"

    @property
    def record(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {**asdict(self), "kinds": dict(self.kinds)}
