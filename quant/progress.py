"""How long work tells how far it is. Whoever calls it decides what is shown; nothing in this package prints."""

from typing import Protocol


class Progress(Protocol):
    """Called after each step of a stage, with `done` of `total`; the last call of a stage has them equal."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`stage` is a few words that a person can read."""
        ...


def silent(stage: str, done: int, total: int) -> None:
    """Shows nothing."""
