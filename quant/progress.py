"""The callback by which long work reports progress; the caller decides what is shown."""

from collections.abc import Callable

# (stage, done, total) after each step; `stage` is a few words for a person, and its last call has done == total.
ReportProgress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Ignore progress."""
