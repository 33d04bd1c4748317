"""What is asked of an engine, one sequence under way, and what a step made of it.

Plain records, without torch. Does not know models, text, or when a sequence has its turn.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

from mycli.runtime.cache.block_table import BlockTable
from mycli.runtime.cache.prefix_store import Found
from mycli.runtime.errors import UserError
from mycli.runtime.sampling.params import SamplingParams

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.runtime.sampling.grammar import Grammar
    from mycli.runtime.sampling.logprobs import TokenLogprob

FinishReason = Literal["stop", "length", "context", "cancelled", "deadline", "error"]


@dataclass(frozen=True)
class Request:
    """What is to be written after `prompt` (ids).

    limit: most tokens, None for as many as the context holds; stop_ids: tokens that end it and are not part of it;
    logprobs: of so many likeliest tokens a place, None for none; prompt_logprobs: as many for the prompt's tokens too;
    deadline: seconds that it may wait for its turn, None for as long as it takes.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    limit: int | None = None
    stop_ids: frozenset[int] = frozenset()
    grammar: "Grammar | None" = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    deadline: float | None = None


@dataclass(frozen=True)
class SequenceOutput:
    """What a step did for one sequence: its new tokens, and why it ended, None while it goes on.

    logprobs: one for each of `tokens`, where they were asked for; prompt_logprobs: of the prompt's tokens, from the
    second on, as they are read; cached_tokens: of the prompt, that were in the cache, and `cache_miss` says why not
    more; queued: seconds before its first turn; drafted, accepted: tokens, by speculation in this step; error: what
    went wrong, where the reason is "error".
    """

    sequence: int
    tokens: tuple[int, ...] = ()
    logprobs: "tuple[TokenLogprob, ...]" = ()
    prompt_logprobs: "tuple[TokenLogprob, ...]" = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    cache_miss: str = ""
    queued: float = 0.0
    drafted: int = 0
    accepted: int = 0
    error: UserError | None = None


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One request under way. `tokens`: its prompt and what was drawn; `table`: where the first of them lie."""

    id: int
    request: Request
    table: BlockTable
    limit: int  # tokens to draw at most: what was asked for, or what the context holds
    arrived: float  # seconds of the engine's clock
    tokens: list[int]
    status: Status = Status.WAITING
    started: bool = False  # it had its turn once
    cached: int = 0
    miss: str = ""
    queued: float = 0.0  # seconds before its first turn
    found: Found = Found()  # what a folder keeps of its text
    branches: "list[Sequence]" = field(default_factory=list)  # begin with what this one has once its prompt is read

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def drawn(self) -> int:
        """Tokens that were drawn."""
        return len(self.tokens) - self.prompt

    @property
    def missing(self) -> int:
        """Tokens that are not in the cache; the last drawn never is."""
        return len(self.tokens) - self.table.length

    @property
    def decoding(self) -> bool:
        """Whether its next pass is over the token drawn last."""
        return self.drawn > 0 and self.missing == 1

    @property
    def scored(self) -> bool:
        """Whether the logits of all tokens it reads are wanted."""
        return self.request.prompt_logprobs and not self.drawn
