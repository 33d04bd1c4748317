"""Several steps a launch against the loop of one: the same tokens, and the same cache for whatever comes next.

In the interpreter, for the choice of tokens. A step that reads the text back from the cache stands in for the fused
pass, except in one test; a recording, or nothing, for a CUDA graph.
"""

import gc
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import StaticCache
from mycli.runtime.engine.generate import Session
from mycli.runtime.engine.model_runner import FastPaths, ModelRunner
from mycli.runtime.errors import ModelError
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.rope import Rope
from mycli.runtime.models.config import RopeScaling
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from tests.support.graphs import recording
from tests.support.prefix_model import CPU, PrefixModel, random_function
from tests.support.triton_interpreter import Interpret, interpret

pytest.importorskip("triton")

from mycli.runtime.engine import device_loop  # noqa: E402  (only where Triton is)
from mycli.runtime.engine.cuda_graph import Capture, Launches, Replay  # noqa: E402  (as above)
from mycli.runtime.engine.device_loop import STEPS, DeviceLoop  # noqa: E402  (as above)

__all__ = ["interpret"]

VOCAB, PADDING = 300, 20
PROMPT = [3, 141, 59, 26]
CAPTURES: dict[str, Capture | None] = {"none": None, "runs-when-captured": recording, "does-not": lambda work: work}
Outcome = tuple[list[list[int]], bool, int, list[int], object, int]


class Sequences(PrefixModel):
    """Other logits for every sequence; the rows that pad the head are the largest. NaN after `broken` tokens."""

    def __init__(self, seed: int = 0, broken: int = 99) -> None:
        random = random_function(seed, VOCAB + PADDING)

        def function(text: tuple[int, ...]) -> Tensor:
            logits = random(text)
            logits[VOCAB:] += 50
            return logits * torch.nan if len(text) > broken else logits

        super().__init__(function, VOCAB + PADDING)

    def forward(self, batch: Batch, rope: Rope, cache: StaticCache | None = None) -> Tensor | None:
        assert cache is not None and cache.length == batch.start
        stored = batch.tokens.float()[:, None, :, None].expand(-1, 1, -1, 2)
        cache.write(0, batch.start, stored, stored)
        cache.advance(batch.count)
        return None if batch.logits == "none" else self.after(cache, [batch.end] * cache.sequences)

    def after(self, cache: StaticCache, lengths: list[int]) -> Tensor:
        """Logits [sequences, 1, vocab + padding]."""
        rows = zip(held(cache), lengths, strict=True)
        return torch.stack([self.logits((place, *row[:end])) for place, (row, end) in enumerate(rows)])[:, None]


def held(cache: StaticCache) -> list[list[int]]:
    found: list[list[int]] = cache.all(0)[0].data[:, 0, :, 0].long().tolist()
    return found


class Step:
    """What the fused pass does, with the tokens and lengths of its buffers."""

    def __init__(self, model: Sequences) -> None:
        self.model, self.calls = model, 0

    def takes(self, sequences: int, tokens: int) -> bool:
        return sequences < 5

    def __call__(
        self, tokens: Tensor, lengths: Tensor, tables: tuple[Tensor, Tensor], cache: StaticCache, last: bool
    ) -> Tensor:
        self.calls += 1
        keys = cache.all(0)[0].data
        for place, end in enumerate(lengths.tolist()):
            keys[place, 0, end - 1] = tokens[place, 0].float()
        return self.model.after(cache, lengths.tolist()).float()


def sessions(capture: str, capacity: int = 64, sequences: int = 1, broken: int = 99) -> tuple[Session, Session, Step]:
    """With the loop and without, of equal models."""
    looped, plain = Sequences(broken=broken), Sequences(broken=broken)
    step = Step(looped)
    fast = FastPaths(loop=DeviceLoop(step, CAPTURES[capture]))
    ours, theirs = ModelRunner(looped, fast=fast), ModelRunner(plain)
    return Session(ours, capacity, sequences), Session(theirs, capacity, sequences), step


def outcome(
    session: Session,
    prompt: list[int],
    limit: int,
    stop: frozenset[int] = frozenset(),
    take: int | None = None,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008  (frozen)
) -> Outcome:
    """All that a caller sees of a reply of which it reads `take` tokens, and all that the next turn depends on."""
    sampler = Sampler(sampling, VOCAB, CPU, session.cache.sequences)
    stream = session.generate(prompt, sampler, limit, stop)
    tokens = list(islice(stream, take))
    stream.close()
    length = session.cache.length
    rows = [row[:length] for row in held(session.cache)]
    return tokens, session.stopped, length, list(session._tokens), rows, session.timing.generated


def limits(capture: str, capacity: int, sequences: int) -> int:
    """Every limit, on one session each, whose cache is reused from turn to turn. Steps done."""
    looped, plain, step = sessions(capture, capacity, sequences)
    for limit in (*range(11), 60):
        for prompt in (PROMPT, [*PROMPT, 7, limit]):
            assert outcome(looped, prompt, limit) == outcome(plain, prompt, limit), limit
    return step.calls


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize(("capacity", "sequences"), [(32, 1), (13, 1), (11, 2)])
def test_limits_and_capacities(capture: str, capacity: int, sequences: int, interpret: Interpret) -> None:
    steps = interpret(limits, capture, capacity, sequences)
    assert isinstance(steps, int) and steps > 2 * capacity


def test_sequences_that_the_pass_does_not_take(interpret: Interpret) -> None:
    assert interpret(limits, "none", 32, 5) == 0


def ends(capture: str, sequences: int) -> list[int]:
    """A stop token, or a consumer that leaves, at every place; then the next turn, which begins with what was said."""
    looped, plain, _ = sessions(capture, 64, sequences)
    reply = [row[0] for row in outcome(plain, PROMPT, 14)[0]]
    found = []
    for place, token in enumerate(reply):
        for stop, take in ((frozenset((token,)), None), (frozenset[int](), place + 1)):
            ours = outcome(looped, PROMPT, 14, stop, take)
            assert ours == outcome(plain, PROMPT, 14, stop, take), (place, stop)
            turn = [*PROMPT, *(row[0] for row in ours[0]), 5]
            assert outcome(looped, turn, 6) == outcome(plain, turn, 6), (place, stop)
            assert looped.timing.cached == plain.timing.cached
            found.append(len(ours[0]))
    return found


@pytest.mark.parametrize(("capture", "sequences"), [("none", 1), ("runs-when-captured", 2), ("does-not", 1)])
def test_stops_and_consumers_that_leave_at_every_place(capture: str, sequences: int, interpret: Interpret) -> None:
    expected = [count for place in range(14) for count in (place, place + 1)]
    assert interpret(ends, capture, sequences) == expected


def failures() -> None:
    for broken in range(len(PROMPT) + 1, len(PROMPT) + 12):
        found = []
        for session in sessions("does-not", broken=broken)[:2]:
            tokens = []
            with pytest.raises(ModelError, match="not a number"):
                for row in session.generate(PROMPT, Sampler(SamplingParams(), VOCAB, CPU), 20):
                    tokens.append(row)  # noqa: PERF402  (those before the error count)
            found.append((tokens, session.cache.length, session._tokens))
        assert found[0] == found[1] and len(found[0][0]) == broken - len(PROMPT)


def test_logits_that_are_no_numbers_end_the_reply_where_they_come(interpret: Interpret) -> None:
    interpret(failures)


def drawn(capture: str, limit: int, seed: int, sequences: int) -> list[list[int]]:
    looped, _, step = sessions(capture, 64, sequences)
    found = outcome(looped, PROMPT, limit, sampling=SamplingParams(temperature=1.0, seed=seed))[0]
    assert step.calls >= limit - 1
    return found


def test_a_seed_is_a_reply_whatever_the_limit(interpret: Interpret) -> None:
    """E9: drawn tokens do not depend on how steps are put into launches."""
    full = interpret(drawn, "none", 20, 1, 2)
    assert isinstance(full, list) and len({tuple(row) for row in full}) > 10
    assert any(first != second for first, second in full), "sequences draw by themselves"
    assert interpret(drawn, "runs-when-captured", 20, 1, 2) == full
    for limit in (3, 6, 8):
        assert interpret(drawn, "does-not", limit, 1, 2) == full[:limit]
    other = interpret(drawn, "none", 20, 2, 2)
    assert other != full


def other_settings() -> int:
    looped, plain, step = sessions("none")
    for sampling in (
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(temperature=1.0, repetition_penalty=1.3, seed=1),
    ):
        assert outcome(looped, PROMPT, 9, sampling=sampling) == outcome(plain, PROMPT, 9, sampling=sampling)
    dynamic = replace(looped.runner.config, rope=RopeScaling("dynamic", 2.0, original_context=16))
    looped.runner._ropes[looped.cache] = Rope(dynamic, 64, CPU, torch.float32)
    assert outcome(looped, PROMPT, 9) == outcome(plain, PROMPT, 9)
    return step.calls


def test_other_settings_and_moving_tables_are_the_hosts(interpret: Interpret) -> None:
    assert interpret(other_settings) == 0


def narrowed(capture: str) -> int:
    """Filters that leave the likeliest alone, and between them, in the same launches, some that do not."""
    looped, plain, step = sessions(capture, sequences=2)
    expected = outcome(plain, PROMPT, 9)
    for one, more in (
        ({"top_k": 1}, {"top_k": 90}),
        ({"top_p": 0.0}, {"top_p": 0.99}),
        ({"min_p": 1.0}, {"min_p": 0.01}),
    ):
        for values, same in ((one, True), (more, False), (one, True)):
            found = outcome(looped, PROMPT, 9, sampling=SamplingParams(temperature=1.5, seed=1, **values))
            assert (found == expected) is same, values
    return step.calls


@pytest.mark.parametrize("capture", ["runs-when-captured", pytest.param("none", marks=pytest.mark.slow)])
def test_cuts_are_made_in_the_loop_with_the_values_of_the_reply(capture: str, interpret: Interpret) -> None:
    assert interpret(narrowed, capture) >= 9 * 8


def shared_times() -> list[float]:
    looped, _, _ = sessions("none")
    outcome(looped, PROMPT, 1 + 2 * STEPS + 1)
    return looped.timing.token_seconds


def test_the_tokens_of_a_launch_share_its_time(interpret: Interpret) -> None:
    seconds = interpret(shared_times)
    assert isinstance(seconds, list) and len(seconds) == 2 * STEPS + 2 and min(seconds) > 0
    assert [len(set(seconds[start : start + STEPS])) for start in (1, 1 + STEPS)] == [1, 1]
    assert len(set(seconds)) == 4


def graphs() -> tuple[int, int, int]:
    captures: list[Launches] = []

    def capture(work: Launches) -> Launches:
        """A graph keeps addresses, not what was captured."""
        captures.append(work)
        out = work()
        return lambda: out

    model = Sequences()
    loop = DeviceLoop(Step(model), capture)
    session = Session(ModelRunner(model, fast=FastPaths(loop=loop)), 64)
    counts = []
    for limit in (1 + STEPS, 1 + STEPS, 1 + 3 * STEPS):
        outcome(session, PROMPT, limit)
        counts.append(len(captures))
    captures.clear()
    del session
    gc.collect()
    return counts[0], counts[2], len(loop._held)


def test_the_second_launch_of_a_kind_is_captured_and_goes_with_its_cache(interpret: Interpret) -> None:
    assert interpret(graphs) == (0, 1, 0)


def fused() -> list[list[list[int]]]:
    """Tokens of the real pass: several a launch, one a launch, and by the host."""
    from mycli.runtime.engine.decode_step import DecodeStep
    from tests.support.decode_models import Case, models

    found = []
    for kind in ("loop", "host"):
        model, _ = models(Case({"layers": 1, "heads": 2, "kv_heads": 1, "hidden_size": 64}, sequences=2, int8=True))
        step = DecodeStep.make(model)
        assert isinstance(step, DecodeStep)
        fast = FastPaths(loop=DeviceLoop(step, None)) if kind == "loop" else FastPaths(Replay(step, None))
        session = Session(ModelRunner(model, fast=fast), 32, 2)
        sampler = Sampler(SamplingParams(), model.config.vocab_size - 3, CPU, 2)
        found.append(list(session.generate([5], sampler, 6)))
    return found


def test_the_fused_pass_in_a_loop(interpret: Interpret) -> None:
    ours, theirs = interpret(fused)  # type: ignore[misc]  # the pool carries any result
    assert ours == theirs and len({tuple(row) for row in ours}) > 2


def accelerated(trouble: str) -> tuple[bool, bool, list[str]]:
    """Whether a model then has a short pass and a loop, and the warnings."""
    model, warnings = Sequences(), list[str]()
    patch = pytest.MonkeyPatch()

    def make_replay(_: object, kv: str, __: object) -> Replay | None:
        assert kv == "int8", "the kind of caches that it is run with"
        return None if trouble == "dense" else Replay(Step(model), None)

    patch.setattr(device_loop, "make_replay", make_replay)
    if trouble == "wrong":
        patch.setattr(device_loop, "sample_tokens", lambda *_: None)
    with patch.context():
        fast = device_loop.accelerate(model, "int8", warnings.append)
    patch.undo()
    return fast.replay is not None, fast.loop is not None, warnings


def test_a_loop_is_used_where_the_device_chooses_as_torch_does(interpret: Interpret) -> None:
    assert interpret(accelerated, "") == (True, True, [])
    assert interpret(accelerated, "dense") == (False, False, [])
    short, loop, warnings = interpret(accelerated, "wrong")  # type: ignore[misc]  # the pool carries any result
    assert (short, loop) == (True, False) and "chosen by the host" in warnings[0]
    short, loop, warnings = accelerated("no kernel for this device")  # Triton has none for a CPU
    assert (short, loop) == (True, False) and "chosen by the host" in warnings[0] and "\n" not in warnings[0]
