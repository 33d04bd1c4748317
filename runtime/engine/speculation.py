"""What an engine asks of whoever guesses tokens ahead of its passes. The guessing is `runtime.speculative`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mycli.runtime.sampling.sampler import Sampler


@dataclass(frozen=True)
class Drafted:
    """A sequence that wants tokens drafted: its number and text, how many at most, and how it draws."""

    sequence: int
    text: Sequence[int]
    count: int
    sampler: Sampler


Listener = Callable[[Tensor], None]  # takes what the model's head reads of every token of a pass, [T, hidden]


@dataclass(frozen=True)
class Heard:
    """Of a pass the part of one sequence: its number, `count` tokens from position `start` on, and its text so far.

    Drafted tokens count, and are not in the text.
    """

    sequence: int
    start: int
    count: int
    text: Sequence[int]


class Speculator(Protocol):
    """Guesses tokens ahead of a pass and judges them after it; see `runtime.speculative.speculator`."""

    @property
    def step_seconds(self) -> float | None:
        """Of a plain step, None before one was measured."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        ...

    def wanted(self, sequence: int, text: Sequence[int], room: int, decoding: int) -> int:
        """Tokens to draft after `text`, at most `room`, where so many sequences decode."""
        ...

    def listener(self, heard: Iterable[Heard]) -> Listener | None:
        """What is to be shown the hidden states of a pass, side by side; None where nobody wants them."""
        ...

    def propose(self, asked: Sequence[Drafted]) -> list[list[int]]:
        """Tokens that may come next for each, maybe none."""
        ...

    def accept(self, sequence: int, logits: Tensor, sampler: Sampler) -> list[int]:
        """What follows by `logits` [1 + drafted, vocab]: the part of the last proposal that stands and one more."""
        ...

    def observe(self, results: Sequence[tuple[int, int, int]], seconds: float) -> None:
        """A decoding step is over: (sequence, drafted, accepted) of each, and what it took with the drafting."""
        ...

    def keep(self, sequence: int, length: int) -> None:
        """Forget what was read of a sequence beyond its first `length` tokens."""
        ...

    def end(self, sequence: int, text: Sequence[int]) -> None:
        """The sequence is over; this was its text."""
        ...

    def forget(self) -> None:
        """Keep nothing of the texts so far."""
        ...
