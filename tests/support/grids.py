"""Which cases of a grid the default run takes: one idiom for all."""

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
