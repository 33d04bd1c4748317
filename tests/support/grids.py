"""Limits how much of a grid or of a property the default test run covers.

`make test-all` runs every case of a grid, and a large number of examples of a property.
"""

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

THOROUGH = bool(os.environ.get("MYCLI_THOROUGH"))  # set by `make test-all`


def chosen(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return every case, with those not in `quick` marked slow; cases with several arguments are tuples.

    `quick` must contain each value of each axis at least once, and every case that has found a fault before.
    """
    every = list(cases)
    missing = [case for case in quick if case not in every]
    assert not missing, f"not of the grid: {missing}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else pytest.mark.slow)
        for case in every
    ]


def examples(quick: int, thorough: int) -> int:
    """Return the number of examples of a property to try; `thorough` if MYCLI_THOROUGH is set."""
    return thorough if THOROUGH else quick
