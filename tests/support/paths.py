"""Paths of the checkout and of the two models in the package."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PICO = ROOT / "runtime" / "pico" / "pico"
DRAFT = ROOT / "runtime" / "pico" / "pico-draft"
