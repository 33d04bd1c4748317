"""The interface between the engine and speculative decoding; `runtime.speculative` implements it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mycli.runtime.engine.sequence import SequenceOutput
from mycli.runtime.layers.transformer import HiddenStateHook
from mycli.runtime.sampling.sampler import Sampler


@dataclass(frozen=True)
class DraftRequest:
    """A sequence to draft for: its number and tokens, the maximum number of draft tokens, and its sampler."""

    sequence: int
    tokens: Sequence[int]
    count: int
    sampler: Sampler


@dataclass(frozen=True)
class ComputedTokens:
    """The part of one sequence in a pass: `count` tokens from position `start`, drafts included, and its tokens so far.

    Draft tokens are not in `tokens`.
    """

    sequence: int
    start: int
    count: int
    tokens: Sequence[int]


class Speculator(Protocol):
    """Proposes tokens before a pass and verifies them after it; see `runtime.speculative.speculator`."""

    @property
    def step_seconds(self) -> float | None: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def rests(self) -> bool:
        """Whether nothing is drafted in this step and the next ones, and no pass needs to be observed."""
        ...

    def draft_length(self, sequence: int, tokens: Sequence[int], room: int, decoding: int) -> int:
        """Return how many tokens to draft after `tokens`, at most `room`, while `decoding` sequences decode."""
        ...

    def hidden_state_hook(self, parts: Iterable[ComputedTokens]) -> HiddenStateHook | None:
        """Return the hook for the hidden states of a pass over `parts`; None if they are not needed."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]: ...

    def verify(self, sequence: int, logits: Tensor, sampler: Sampler) -> list[int]:
        """Return the accepted part of the last proposal and one more token, by logits [1 + drafted, vocab]."""
        ...

    def observe(self, outputs: Sequence[SequenceOutput], seconds: float) -> None:
        """Record a decode step: its outputs, and its seconds with drafting."""
        ...

    def observe_plain(self, tokens: int, seconds: float) -> None:
        """Record `tokens` steps that a pass made by itself while the speculator rested."""
        ...

    def truncate(self, sequence: int, length: int) -> None: ...

    def finish(self, sequence: int, tokens: Sequence[int]) -> None: ...

    def forget(self) -> None: ...
