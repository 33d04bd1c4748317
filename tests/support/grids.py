"""How much of a grid or of a property the default run takes: one idiom for each.

`make test-all` takes every case of a grid, and of a property as many examples as are worth a night.
"""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def chosen(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Every case, those that are not in `quick` marked slow; what several arguments take is a tuple of their values.

    Among the quick ones stands each value of each axis at least once, and whatever found a fault before.
    """
    every = list(cases)
    missing = [case for case in quick if case not in every]
    assert not missing, f"not of the grid: {missing}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else pytest.mark.slow)
        for case in every
    ]


def examples(quick: int, thorough: int) -> int:
    """How many examples of a property to try; `thorough` where MYCLI_THOROUGH is set."""
    return thorough if os.environ.get("MYCLI_THOROUGH") else quick
