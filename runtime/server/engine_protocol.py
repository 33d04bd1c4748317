"""What the server asks of an engine: sequences go in, tokens come out step by step.

Everything is called from one thread, the engine's. Does not know text, requests of HTTP or how a step is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from mycli.runtime.errors import UserError
from mycli.runtime.sampling.grammar import Grammar
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.sampling.params import SamplingParams

EndReason = Literal["stop", "length", "context", "cancelled", "deadline", "error"]


@dataclass(frozen=True)
class EngineRequest:
    """One sequence: at most `limit` tokens after `prompt` (None: to the end of the context), until one of `stop_ids`.

    `logprobs`: of so many tokens a place, None for none; `prompt_logprobs`: of the prompt's tokens as well; `deadline`:
    seconds that it may wait for its turn.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    limit: int | None = None
    stop_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    deadline: float | None = None


@dataclass(frozen=True)
class EngineOutput:
    """What one step made of a sequence: `tokens` are new, without an end token; `logprobs` are theirs.

    `prompt_logprobs` come with the first outputs, one for each token of the prompt but the first. `error` is why it
    ended with "error".
    """

    sequence: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: EndReason | None = None
    cached_tokens: int = 0
    error: UserError | None = None


@dataclass(frozen=True)
class EngineStats:
    """How busy an engine is: sequences running and waiting, the share of its cache in use, counts since it began."""

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0
    preemptions: int = 0


class ServedEngine(Protocol):
    """An engine of sequences that are served together, or one after another."""

    @property
    def context(self) -> int:
        """Most tokens of a sequence, prompt and reply."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        ...

    @property
    def stats(self) -> EngineStats:
        """How busy it is."""
        ...

    def submit(self, request: EngineRequest) -> int:
        """Take a sequence and give it a number. Raises UserError for one that can never run."""
        ...

    def cancel(self, sequence: int) -> None:
        """Forget a sequence; its last output may still come. Of one that has ended: nothing."""
        ...

    def step(self) -> Sequence[EngineOutput]:
        """Make the next tokens. A failure of one sequence is an output of it, not an exception."""
        ...
