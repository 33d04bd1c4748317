"""A model that speaks: runner, tokenizer, end tokens and sampling defaults of one folder, and its replies.

Turns a prompt of ids into text until the model ends, a stop string appears or a limit is reached: one reply, streamed,
or several side by side. Knows text; does not know commands, terminals or how the pieces are shown.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.generate import count_step
from mycli.runtime.engine.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.sequence import FinishReason, Request, SequenceOutput
from mycli.runtime.engine.stats import Timing
from mycli.runtime.errors import UserError
from mycli.runtime.models.generation_config import GenerationDefaults, stop_ids
from mycli.runtime.sampling.grammar import Grammar
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.tokenizer.stream import StopMatcher, StreamDecoder
from mycli.runtime.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """What a folder holds, loaded. `warnings` are for a person: fields dropped, no end token, and the like."""

    runner: ModelRunner
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    stop_ids: frozenset[int]
    warnings: tuple[str, ...]

    @property
    def vocabulary_size(self) -> int:
        """Ids that may be drawn: rows that only pad the head to a round number have no token."""
        vocabulary = self.tokenizer.vocabulary
        return max(index for index, token in enumerate(vocabulary) if token is not None) + 1

    @classmethod
    def load(
        cls,
        folder: ModelFolder,
        placement: Placement,
        *,
        allow_nonfinite: bool = False,
        warn: Callable[[str], None] = lambda text: None,
        tokenizer: Tokenizer | None = None,
        expert_slots: int | None = None,
    ) -> "LoadedModel":
        """Cheap checks first: a broken tokenizer is found before gigabytes are read. Raises ModelError.

        `tokenizer` is the folder's where it is open already; `warn` is told each of the `warnings` at once, and what
        goes wrong while the model is used. `expert_slots`: as of `load_model`.
        """
        config = folder.config
        tokenizer = tokenizer or folder.tokenizer()
        defaults, dropped = folder.generation
        ids, missing = stop_ids(defaults.eos, config.eos, tokenizer.eos, config.vocab_size)
        warnings: list[str] = []

        def tell(text: str) -> None:
            warnings.append(text)
            warn(text)

        for text in (*dropped, *missing):
            tell(text)
        runner = load_model(folder, placement, allow_nonfinite=allow_nonfinite, warn=tell, expert_slots=expert_slots)
        return cls(runner, tokenizer, defaults, frozenset(ids), tuple(warnings))


class Completion:
    """One reply: iterate for its text as it becomes certain, then read what it was.

    The pieces joined are the whole `text`: whole characters only, nothing of a stop string, control tokens never shown.
    `tokens` are the ids drawn without the end token, `logprobs` one for each where they were asked for;
    `finish_reason` is None while it goes on, `error` what broke it off.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        engine: Engine,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        limit: int | None = None,
        stops: Sequence[str] = (),
        grammar: Grammar | None = None,
        top: int | None = None,
    ) -> None:
        """`limit` None fills the context; `top`: logprobs of so many tokens a place, None for no logprobs."""
        self.request = Request(tuple(prompt), sampling, limit, loaded.stop_ids, grammar, top)
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.error: UserError | None = None
        self.timing = Timing(prompt=len(prompt))
        self._engine = engine
        self._decoder, self._matcher = StreamDecoder(loaded.tokenizer), StopMatcher(stops)

    def begin(self) -> int:
        """Queue it: the number of its sequence. Raises UsageError for a prompt or a limit that does not fit."""
        return self._engine.submit(self.request)

    def fail(self, error: UserError) -> None:
        """It ends before it began."""
        self.error, self.finish_reason = error, "error"

    def take(self, output: SequenceOutput) -> str:
        """The text that the last step of the engine made certain; after a stop string nothing counts any more."""
        count_step(self.timing, self._engine, output)
        self.error, piece = output.error, ""
        for index, token in enumerate(output.tokens):
            self.tokens.append(token)
            self.logprobs += output.logprobs[index : index + 1]
            piece += self._feed(self._decoder.feed(token))
            if self.finish_reason is not None:
                return piece
        if output.finish_reason is not None:
            piece += self._feed(self._decoder.flush())
            if self.finish_reason is None:
                rest = self._matcher.flush()
                self.text += rest
                piece += rest
                self.finish_reason = output.finish_reason
        return piece

    def _feed(self, text: str) -> str:
        piece, found = self._matcher.feed(text)
        self.text += piece
        if found:
            self.finish_reason = "stop"
        return piece

    def __iter__(self) -> Iterator[str]:
        """Pieces of text as they become certain, none empty. Raises what `begin` raises, and the error that ends it."""
        number = self.begin()
        try:
            while self.finish_reason is None:
                for output in self._engine.step():
                    if output.sequence == number and (piece := self.take(output)):
                        yield piece
            if self.error is not None:
                raise self.error
        finally:
            self._engine.cancel(number)  # a consumer may leave; the step that tells is the next reply's


def complete_all(
    engine: Engine, groups: Iterable[Sequence[Completion]], together: int
) -> Iterator[Sequence[Completion]]:
    """Every group of replies when all of it has ended, in the order given; `together` groups are under way at most.

    The replies of a group are to one prompt, which is read once for all of them. One that cannot begin, or breaks off,
    has its `error`.
    """
    source, under_way = iter(groups), dict[int, Completion]()
    order: deque[Sequence[Completion]] = deque()
    try:
        while True:
            for group in islice(source, together - len(order)):
                order.append(group)
                under_way.update(_begin(engine, group))
            if not order:
                return
            if all(reply.finish_reason is not None for reply in order[0]):
                yield order.popleft()
            else:
                _step(engine, under_way)
    finally:
        for number in under_way:
            engine.cancel(number)


def _begin(engine: Engine, group: Sequence[Completion]) -> dict[int, Completion]:
    """The replies by the numbers of their sequences; none where the first is refused, and then nor are the others."""
    if group[0].finish_reason is not None:
        return {}
    try:
        number = group[0].begin()
    except UserError as error:
        for reply in group:
            reply.fail(error)
        return {}
    return dict(zip((number, *engine.branch(number, len(group) - 1)), group, strict=True))


def _step(engine: Engine, under_way: dict[int, Completion]) -> None:
    """One step for all; those that have ended leave."""
    for output in engine.step():
        reply = under_way.get(output.sequence)
        if reply is None:
            continue
        reply.take(output)
        if reply.finish_reason is not None:
            del under_way[output.sequence]
            engine.cancel(output.sequence)  # a stop string is not the engine's


def draw_samples(engine: Engine, replies: Sequence[Completion]) -> Sequence[Completion]:
    """`replies` to one prompt, which is read once, side by side to their ends.

    Raises UsageError for a prompt or a limit that does not fit, and the first error that breaks a reply off.
    """
    (drawn,) = complete_all(engine, [replies], 1)
    for reply in drawn:
        if reply.error is not None:
            raise reply.error
    return drawn
