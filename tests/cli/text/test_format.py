"""The words of cards and status lines."""

from types import SimpleNamespace
from typing import Any

import pytest

from mycli.cli.text.format import draft_statistics


@pytest.mark.parametrize(
    ("passes", "speedup", "words"),
    [(3, 1.62, ["draft 71% (1.6x)"]), (3, None, ["draft 71%"]), (0, None, ["draft off"])],
)
def test_drafts_are_described(passes: int, speedup: float | None, words: list[str]) -> None:
    timing: Any = SimpleNamespace(record=SimpleNamespace(passes=passes, acceptance_rate=0.71), speedup=speedup)
    assert draft_statistics(timing) == words
    timing.record = None
    assert draft_statistics(timing) == []
