"""One reply of an engine as ids, to its end, and what each step of it counts for.

What measures and compares uses it; whoever wants text takes a `Completion`. Knows ids and times; does not know text.
"""

from collections.abc import Iterator

from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.sequence import Request, SequenceOutput
from mycli.runtime.engine.stats import SpeculationStats, Timing


def count_step(timing: Timing, engine: Engine, output: SequenceOutput) -> None:
    """Add to `timing` what the last step of `engine` did for the sequence of `output`; its tokens share the time."""
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
                    count_step(timing, engine, output)
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
