"""Where the checkout and the two models of the package are."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PICO = ROOT / "runtime" / "pico" / "pico"
DRAFT = ROOT / "runtime" / "pico" / "pico-draft"
