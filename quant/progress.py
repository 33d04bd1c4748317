"""The callbacks by which long work reports to its caller, which decides what is shown."""

from collections.abc import Callable
from dataclasses import dataclass

# (stage, done, total) after each step; `stage` is a few words for a person, and its last call has done == total.
# A stage of few and long steps begins with done == 0, so that the time of the first step counts.
ReportProgress = Callable[[str, int, int], None]
ReportNote = Callable[[str], None]  # a sentence for a person, before the work is done


def silent(stage: str, done: int, total: int) -> None:
    """Ignore progress."""


def ignore(note: str) -> None:
    """Ignore a note."""


@dataclass(frozen=True)
class Callbacks:
    progress: ReportProgress = silent
    note: ReportNote = ignore
