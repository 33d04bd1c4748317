"""A request, the sequence that answers it, and what a step of the engine returns for it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Literal

from mycli.runtime.cache.block_table import BlockTable
from mycli.runtime.cache.prefix_index import StoredPrefix
from mycli.runtime.errors import UsageError, UserError
from mycli.runtime.sampling.params import SamplingParams, following_seed

if TYPE_CHECKING:  # torch takes a second to import
    from torch import Tensor

    from mycli.runtime.sampling.grammars.grammar import Grammar
    from mycli.runtime.sampling.logprobs import TokenLogprob
    from mycli.runtime.sampling.token_filter import TokenFilter

MAX_BEAMS = 64
MAX_PENALTY = 10.0
FinishReason = Literal["stop", "length", "context", "cancelled", "deadline", "error"]


@dataclass(frozen=True)
class ReplyStart:
    """The start of a reply. seed: of its random numbers; tokens: its first tokens; numbers: how many they took.

    shortened: as in `SequenceOutput`.
    """

    seed: int
    tokens: tuple[int, ...] = ()
    numbers: int = 0
    shortened: bool = False

    def for_reply(self, index: int) -> "ReplyStart":
        """Return the start of reply `index` to one prompt, none of which has tokens yet."""
        return replace(self, seed=following_seed(self.seed, index))


@dataclass(frozen=True)
class BeamOptions:
    """Beam search, as in transformers' `generate`.

    length_penalty: the score is divided by the length to this power; early_stopping: True ends the search with `width`
    finished beams, False when a better one is unlikely, "never" when a better one is impossible. Raises UsageError for
    values outside their range.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MAX_BEAMS:
            raise UsageError(
                f"{self.width} beams are out of range", f"use 1 to {MAX_BEAMS} beams", data={"setting": "beams"}
            )
        if not -MAX_PENALTY <= self.length_penalty <= MAX_PENALTY:  # false for NaN
            raise UsageError(
                f"length_penalty {self.length_penalty} is out of range",
                f"choose between -{MAX_PENALTY:g} and {MAX_PENALTY:g}",
                data={"setting": "length_penalty"},
            )


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    limit: maximum number of new tokens, None for as many as the context holds; stop_ids: tokens that end the reply and
    are not part of it; min_tokens: number of new tokens before which no stop token is sampled, unless a grammar allows
    nothing else; logprobs: number of alternatives at each token, None for no logprobs; prompt_logprobs: also for
    the tokens of the prompt; deadline: seconds after which the reply is to end, None for any time; a request that has
    not begun by then ends without a reply; hidden_states: return the final hidden states of the last token of the
    prompt, or of all; scored_tokens: return the logits of these tokens after the prompt; user, weight: the user whose
    share of the machine it uses, and the size of that share; group: requests of a user with the same one take turns
    with its others as if they were a single request, empty for a group of its own; batch: it runs only when no other
    request is waiting; start: where an interrupted reply continues, with a seed that replaces that of `sampling`;
    beams: search for the most likely replies instead of sampling; token_types: of the tokens of a pair of texts, empty
    for type 0; token_filter: tokens that are not sampled.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    limit: int | None = None
    stop_ids: frozenset[int] = frozenset()
    grammar: "Grammar | None" = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    deadline: float | None = None
    hidden_states: Literal["last", "all"] | None = None
    scored_tokens: tuple[int, ...] = ()
    user: str = ""
    weight: float = 1.0
    group: str = ""
    batch: bool = False
    start: ReplyStart | None = None
    beams: BeamOptions | None = None
    token_types: tuple[int, ...] = ()
    min_tokens: int = 0
    token_filter: "TokenFilter | None" = None

    def for_reply(self, index: int) -> "Request":
        """Return the request for reply `index` to the same prompt, with a seed of its own."""
        start = None if self.start is None else self.start.for_reply(index)
        return replace(self, sampling=self.sampling.for_reply(index), start=start)

    def reply_limit(self, context: int, cache_tokens: int) -> int:
        """Return the maximum number of new tokens, in a context and a cache of the given sizes in tokens.

        Raises UsageError, with the token counts, for an empty prompt and for a request that can never fit.
        """
        prompt = len(self.prompt)
        if not prompt:
            raise UsageError("the prompt is empty", "write something, or use a model that has a start token")
        if prompt > context:
            raise UsageError(f"the prompt has {prompt} tokens, the context has room for {context}", code="more-context")
        room = reply_room(context, prompt)
        if self.limit is not None and self.limit > room:
            raise UsageError(
                f"{prompt} prompt tokens and {self.limit} more do not fit the context of {context}",
                code="fewer-tokens-or-more-context",
                data={"tokens": max(room, 0)},
            )
        limit = room if self.limit is None else self.limit
        if prompt + max(limit - 1, 0) > cache_tokens:
            raise UsageError(
                f"{prompt} prompt tokens and {limit} more do not fit the cache of {cache_tokens} tokens",
                code="fewer-tokens-or-more-context",
                data={"tokens": max(reply_room(cache_tokens, prompt), 0)},
            )
        return limit


def reply_room(context: int, prompt: int) -> int:
    """Return how many tokens can be sampled after `prompt` tokens; below 1 if the prompt does not fit.

    The last sampled token needs no place in the cache, so there is room for one more than the context has left.
    """
    return context - prompt + 1


@dataclass(frozen=True)
class SequenceOutput:
    """The output of one step for a sequence: new tokens, and why it ended, None while it continues.

    logprobs: one for each of `tokens`, if requested; prompt_logprobs: of prompt tokens from the second on, as they are
    computed; cached_tokens: prompt tokens found in the cache; queued: seconds before the first pass; drafted, accepted:
    draft tokens of this step; error: set if the reason is "error"; hidden: [rows, hidden] and scores: [tokens], if
    requested, with the end of the sequence; numbers: random numbers that the sequence has taken so far; shortened: a
    limit made the reply end under its grammar, so its reason is "length"; prompt_tokens: those computed or found in the
    cache.
    """

    sequence: int
    tokens: tuple[int, ...] = ()
    logprobs: "tuple[TokenLogprob, ...]" = ()
    prompt_logprobs: "tuple[TokenLogprob, ...]" = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    queued: float = 0.0
    drafted: int = 0
    accepted: int = 0
    error: UserError | None = None
    hidden: "Tensor | None" = None
    scores: "Tensor | None" = None
    numbers: int = 0
    shortened: bool = False
    prompt_tokens: int = 0


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class RequestSequence:
    """A request in the engine. `tokens`: the prompt and the sampled tokens; `table`: the cache blocks of the first."""

    id: int
    request: Request
    table: BlockTable
    limit: int  # maximum number of sampled tokens
    arrived: float  # seconds of the engine's clock
    tokens: list[int]
    group: str  # of the request whose turns it shares
    due: float = 0.0  # orders the prompts of its user; see `FairShares`
    status: Status = Status.WAITING
    started: bool = False  # was in a pass before
    cached: int = 0  # prompt tokens found in the cache
    miss: str = ""  # why no more were found
    queued: float = 0.0  # seconds before the first pass
    stored: StoredPrefix = StoredPrefix()  # its prefix in the disk prefix cache
    # Start from this one's blocks once its prompt is computed.
    branches: "list[RequestSequence]" = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.request.prompt)

    @property
    def sampled(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def has_begun(self) -> bool:
        return self.started and self.sampled > 0

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.table.length

    @property
    def is_decoding(self) -> bool:
        """Whether its next pass computes only the last sampled token."""
        return len(self.tokens) > self.prompt_length and len(self.tokens) - self.table.length == 1

    def late(self, clock: Callable[[], float]) -> bool:
        deadline = self.request.deadline
        return deadline is not None and clock() - self.arrived >= deadline

    @property
    def scored(self) -> bool:
        """Whether the logits of all computed tokens are needed, for prompt logprobs."""
        return self.request.prompt_logprobs and len(self.tokens) == self.prompt_length
