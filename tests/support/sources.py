"""Parses the modules of the three packages once; imports none of them."""

import ast
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

PARTS = ("cli", "quant", "runtime")


DATA = ROOT / "runtime" / "pico"


@cache
def sources() -> list[Path]:
    files = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    return [path for path in files if not path.is_relative_to(DATA) and "__pycache__" not in path.parts]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))
