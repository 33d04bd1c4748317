"""Replies of an engine: one streamed as text or tokens, or many concurrently."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.replies.reader import ReplyReader
from mycli.runtime.engine.sequence import FinishReason, Request, SequenceOutput
from mycli.runtime.engine.stats import SpeculationStats, Timing
from mycli.runtime.errors import UserError

if TYPE_CHECKING:  # few replies are recorded or have logprobs
    from mycli.runtime.engine.replies.journal import RecordedReply
    from mycli.runtime.sampling.logprobs import TokenLogprob


class Completion:
    """One reply: iterate over it for pieces of text; the result is in the attributes.

    text: whole characters, without stop strings and control tokens; tokens: ids, without the end token; logprobs: one
    per token, if requested; finish_reason: None until the end; error: if finish_reason is "error".
    """

    def __init__(
        self, engine: Engine, request: Request, reader: ReplyReader, recorded: "RecordedReply | None" = None
    ) -> None:
        """`recorded`: where the reply is recorded; it may have begun there, as the start of the request says."""
        self.request = request
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.shortened = False  # by a limit, but it matches the grammar
        self.error: UserError | None = None
        self.timing = Timing(prompt=len(request.prompt))
        self._engine, self._reader, self._recorded = engine, reader, recorded

    def fail(self, error: UserError) -> None:
        self.error, self.finish_reason = error, "error"

    def take(self, output: SequenceOutput) -> str:
        """Add one output of the engine and return the text it completes. Raises nothing: see `error`."""
        _count_step(self.timing, self._engine, output)
        if self._recorded is not None:
            self._recorded.append(output)
        return self._read(output)

    def _read(self, output: SequenceOutput) -> str:
        piece = self._reader.feed(output)
        self.text += piece.content
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.error = output.error
        if piece.end is not None:
            self.finish_reason = output.finish_reason if piece.stop is None else "stop"
            self.shortened = output.shortened
        return piece.content

    def __iter__(self) -> Iterator[str]:
        for output in () if self._recorded is None else self._recorded.outputs:
            if piece := self._read(output):
                yield piece
        if self.finish_reason is not None:  # the record is complete
            return
        for output in _outputs(self._engine, self.request):
            if piece := self.take(output):
                yield piece
            if self.finish_reason is not None:  # by a stop string, which the engine does not see, or at the end
                break
        if self.error is not None:
            raise self.error


def _outputs(engine: Engine, request: Request) -> Iterator[SequenceOutput]:
    # If the loop over the outputs is left, the request is cancelled.
    number = engine.submit(request)
    try:
        reason = None
        while reason is None:
            for output in engine.step():
                if output.sequence == number:
                    reason = output.finish_reason
                    yield output
    finally:
        engine.cancel(number)


def complete_all(
    engine: Engine, groups: Iterable[Sequence[Completion]], together: int
) -> Iterator[Sequence[Completion]]:
    """Yield each group of replies once all have ended, in order; at most `together` groups run concurrently.

    The replies of a group have the same prompt, which is computed once. A reply that fails has an `error`.
    """
    source, running = iter(groups), dict[int, Completion]()
    order: deque[Sequence[Completion]] = deque()
    try:
        while True:
            for group in islice(source, together - len(order)):
                order.append(group)
                running.update(_begin(engine, group))
            if not order:
                return
            if all(reply.finish_reason is not None for reply in order[0]):
                yield order.popleft()
            else:
                _step(engine, running)
    finally:
        for number in running:
            engine.cancel(number)


def _begin(engine: Engine, group: Sequence[Completion]) -> dict[int, Completion]:
    if group[0].finish_reason is not None:
        return {}
    try:
        numbers = engine.submit_replies(group[0].request, len(group))
    except UserError as error:
        for reply in group:
            reply.fail(error)
        return {}
    return dict(zip(numbers, group, strict=True))


def _step(engine: Engine, running: dict[int, Completion]) -> None:
    for output in engine.step():
        reply = running.get(output.sequence)
        if reply is None:
            continue
        reply.take(output)
        if reply.finish_reason is not None:
            del running[output.sequence]
            engine.cancel(output.sequence)  # after a stop string, which the engine does not see


def finish_replies(engine: Engine, groups: Sequence[Sequence[Completion]]) -> None:
    """Complete all groups of replies concurrently, as `complete_all` does. Raises the first error of a reply."""
    for _ in complete_all(engine, groups, len(groups)):
        pass
    for reply in (reply for group in groups for reply in group):
        if reply.error is not None:
            raise reply.error


def _count_step(timing: Timing, engine: Engine, output: SequenceOutput) -> None:
    # The tokens of a step share its time; an end token took a step as well.
    timing.add(len(output.tokens) + (output.finish_reason == "stop"), engine.step_seconds)
    timing.cached = output.cached_tokens
    if engine.speculator is not None:
        timing.record = timing.record or SpeculationStats()
        timing.record.step_seconds = engine.speculator.step_seconds
        if output.drafted:
            timing.record.add(output.drafted, output.accepted)


def stream(engine: Engine, request: Request, timing: Timing | None = None) -> Iterator[int]:
    """Yield the tokens of one reply and fill in `timing`. Raises UserError if it is refused or fails."""
    for output in _outputs(engine, request):
        if timing is not None:
            timing.prompt = len(request.prompt)
            _count_step(timing, engine, output)
        yield from output.tokens
        if output.error is not None:
            raise output.error


def generate(engine: Engine, request: Request) -> tuple[list[int], Timing]:
    """Return the tokens of one reply and their timing. Raises what `stream` raises."""
    timing = Timing()
    return list(stream(engine, request, timing)), timing
