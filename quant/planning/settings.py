"""The settings of a plan besides model and recipe: imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Report = Literal["none", "quick", "full"]


@dataclass(frozen=True)
class PlanSettings:
    """The texts to measure and calibrate on, the device, and the limits of memory in bytes."""

    report: Report = "quick"  # on how much text the result is measured
    text: Path | None = None  # to calibrate on; None for the bundled text
    gpu: bool = False
    max_ram: int | None = None  # None: what is free
    max_vram: int | None = None
