"""How long work tells how far it is. Whoever calls it decides what is shown; nothing in this package prints."""

from collections.abc import Callable

# (stage, done, total) after each step: `stage` is a few words for a person; the last call of a stage has both equal.
ReportProgress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Shows nothing."""
