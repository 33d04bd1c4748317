"""A model that speaks: runner, tokenizer, end tokens and sampling defaults of one folder, and its replies.

Turns a prompt of ids into text until the model ends, a stop string appears or a limit is reached: one reply, streamed,
or several side by side. Knows text; does not know commands, terminals or how the pieces are shown.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loader import LoadedModel
from mycli.runtime.engine.reply_reader import ReplyReader
from mycli.runtime.engine.sequence import FinishReason, Request, SequenceOutput
from mycli.runtime.engine.stats import SpeculationStats, Timing
from mycli.runtime.errors import UserError
from mycli.runtime.sampling.grammar import Grammar
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.sampling.params import SamplingParams


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
        self._reader = ReplyReader(loaded.tokenizer, stops)

    def begin(self) -> int:
        """Queue it: the number of its sequence. Raises UsageError for a prompt or a limit that does not fit."""
        return self._engine.submit(self.request)

    def fail(self, error: UserError) -> None:
        """It ends before it began."""
        self.error, self.finish_reason = error, "error"

    def take(self, output: SequenceOutput) -> str:
        """Add one output of the engine; return the text it completes. Not to be called after `finish_reason` is set."""
        _count_step(self.timing, self._engine, output)
        piece = self._reader.feed(output)
        self.text += piece.content
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.error = output.error
        if piece.end is not None:
            self.finish_reason = output.finish_reason if piece.stop is None else "stop"
        return piece.content

    def __iter__(self) -> Iterator[str]:
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


def _count_step(timing: Timing, engine: Engine, output: SequenceOutput) -> None:
    timing.add(len(output.tokens) + (output.finish_reason == "stop"), engine.step_seconds)
    timing.cached = output.cached_tokens
    if engine.speculator is not None:
        timing.record = timing.record or SpeculationStats()
        timing.record.step_seconds = engine.speculator.step_seconds
        if output.drafted:
            timing.record.add(output.drafted, output.accepted)


def stream(engine: Engine, request: Request, timing: Timing | None = None) -> Iterator[int]:
    """The tokens of one reply as they come; `timing` is filled in. A consumer may leave at any token.

    Raises UsageError for what can never be answered, and the error that breaks the reply off.
    """
    number = engine.submit(request)
    try:
        reason = None
        while reason is None:
            for output in engine.step():
                if output.sequence != number:
                    continue
                if timing is not None:
                    timing.prompt = len(request.prompt)
                    _count_step(timing, engine, output)
                yield from output.tokens
                reason = output.finish_reason
                if output.error is not None:
                    raise output.error
    finally:
        engine.cancel(number)


def generate(engine: Engine, request: Request) -> tuple[list[int], Timing]:
    """The tokens of one reply, and what it took. Raises what `stream` raises."""
    timing = Timing()
    return list(stream(engine, request, timing)), timing
