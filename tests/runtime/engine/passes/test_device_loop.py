"""Test several decode steps per launch against single steps: the same tokens and the same cache afterwards.

Token selection runs in the Triton interpreter. A step that reads the tokens back from the cache replaces the fused
pass, except in one test; a recording, or nothing, replaces the CUDA graph.
"""

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import Passes
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.engine.replies.completion import generate, stream
from mycli.runtime.engine.sequence import Request
from mycli.runtime.errors import Declined, ModelError
from mycli.runtime.layers.rope import Rope
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.models.part_spec import RopeScaling
from mycli.runtime.sampling.params import SamplingParams
from tests.support.engines import cached_prefixes, together
from tests.support.graphs import UncomparedPass
from tests.support.grids import chosen
from tests.support.prefix_model import CPU
from tests.support.triton_interpreter import Interpret, interpret

pytest.importorskip("triton")

from mycli.runtime.engine.passes import device_loop  # noqa: E402  (only where Triton is)
from mycli.runtime.engine.passes.device_loop import STEPS, DeviceLoop, compile_loop  # noqa: E402  (as above)
from mycli.runtime.engine.passes.graphs import Launches  # noqa: E402  (as above)
from tests.support.looping import (  # noqa: E402  (as above)
    CAPTURES,
    DRAWN,
    PROMPT,
    VOCAB,
    Sequences,
    Step,
    engines,
    looping,
    outcome,
)

__all__ = ["interpret"]


def limits(capture: str, capacity: int, sequences: int) -> int:
    """Run every limit in one session each, reusing the cache between turns, and return the number of steps."""
    looped, plain, step = engines(capture, capacity, sequences)
    for limit in (*range(11), 60):
        for prompt in (PROMPT, [*PROMPT, 7, limit]):
            assert outcome(looped, prompt, limit) == outcome(plain, prompt, limit), limit
    return step.calls


@pytest.mark.parametrize(
    ("capture", "capacity", "sequences"),
    chosen(
        [(capture, *shape) for capture in CAPTURES for shape in ((32, 1), (13, 1), (11, 2))],
        quick=[("none", 32, 1), ("does-not", 13, 1), ("runs-when-captured", 11, 2)],
    ),
)
def test_limits_and_capacities(capture: str, capacity: int, sequences: int, interpret: Interpret) -> None:
    steps = interpret(limits, capture, capacity, sequences)
    assert isinstance(steps, int) and steps > 2 * capacity


def test_sequences_that_the_pass_does_not_take(interpret: Interpret) -> None:
    assert interpret(limits, "none", 32, 5) == 0


def denied() -> tuple[int, int]:
    """Return the loop's number of passes with two sequences and with one, if it is trusted only with one."""
    calls = []
    for sequences in (2, 1):
        model = Sequences()
        step = Step(model)
        passes = looping(model, step, DeviceLoop(step, None))
        passes.passes[0].trusts = lambda shape: shape == (1, 1, False)  # type: ignore[attr-defined]
        engine = Engine(ModelRunner(model, passes=passes), CacheShape.contiguous(32, sequences), VOCAB)
        outcome(engine, PROMPT, 8)
        calls.append(step.calls)
    return calls[0], calls[1]


def test_passes_that_nobody_has_compared_are_the_hosts(interpret: Interpret) -> None:
    denied_calls, trusted = interpret(denied)  # type: ignore[misc]  # the pool carries any result
    assert denied_calls == 0 and trusted > 0


def ends(capture: str, sequences: int) -> int:
    """End at a stop token or by a leaving consumer at every position, then run a turn with that reply as prefix."""
    looped, plain, _ = engines(capture, 64, sequences)
    limit = 1 + 2 * STEPS + 1  # the first is the prompt; two launches of several steps, one of a single step
    reply = outcome(plain, PROMPT, limit)[0][0]
    for place, token in enumerate(reply):
        for stop, take in ((frozenset((token,)), 999), (frozenset[int](), place + 1)):
            ours, theirs = (outcome(one, PROMPT, limit, stop, take) for one in (looped, plain))
            assert ours[0] == theirs[0] and ours[1] == theirs[1], (place, stop)
            turn = [*PROMPT, *ours[0][0], 5]
            assert outcome(looped, turn, 6)[:2] == outcome(plain, turn, 6)[:2], (place, stop)
    return len(reply)


@pytest.mark.parametrize(
    ("capture", "sequences"),
    chosen([("none", 1), ("runs-when-captured", 2), ("does-not", 1)], quick=[("none", 1), ("runs-when-captured", 2)]),
)
def test_stops_and_consumers_that_leave_at_every_place(capture: str, sequences: int, interpret: Interpret) -> None:
    assert interpret(ends, capture, sequences) == 10


def failures() -> None:
    for broken in range(len(PROMPT) + 1, len(PROMPT) + 12):
        found = []
        for engine in engines("does-not", broken=broken)[:2]:
            tokens: list[int] = []
            with pytest.raises(ModelError, match="not a number"):
                tokens.extend(stream(engine, Request(tuple(PROMPT), limit=20)))
            found.append((tokens, cached_prefixes(engine)))
        assert found[0][1] == found[1][1] == [], "what they hold is of no use"


def test_logits_that_are_no_numbers_end_the_reply(interpret: Interpret) -> None:
    interpret(failures)


def joined(capture: str) -> int:
    """Start and end other requests during a reply: the loop restarts and the tokens stay the same."""
    looped, plain, step = engines(capture, 64, 3)
    texts = []
    for engine in (looped, plain):
        tokens: dict[int, list[int]] = {}
        numbers = [engine.submit(Request((1, 2, 3), limit=30))]
        for round_ in range(200):
            if round_ in (2, 5):
                numbers.append(engine.submit(Request((4 + round_, 2), limit=7)))
            for output in engine.step():
                tokens.setdefault(output.sequence, []).extend(output.tokens)
        assert not engine.has_work
        texts.append([tokens[number] for number in numbers])
    assert texts[0] == texts[1] and [len(one) for one in texts[0]] == [30, 7, 7]
    return step.calls


def test_others_that_come_and_go(interpret: Interpret) -> None:
    assert interpret(joined, "runs-when-captured") > 10


def drawn(capture: str) -> int:
    """Check that sampled replies of every limit equal the host's, with random state and penalties, over two turns."""
    looped, plain, step = engines(capture)
    for sampling in DRAWN:
        for limit in (1 + STEPS, 13):
            ours, theirs = (outcome(engine, PROMPT, limit, sampling=sampling) for engine in (looped, plain))
            assert ours == theirs, (sampling, limit)
            assert len(set(ours[0][0])) > 3
    return step.calls


@pytest.mark.parametrize("capture", chosen(list(CAPTURES), quick=["runs-when-captured"]))
def test_draws_are_the_hosts(capture: str, interpret: Interpret) -> None:
    calls = interpret(drawn, capture)
    assert isinstance(calls, int) and calls >= len(DRAWN) * (STEPS + 12)


def mixed(capture: str) -> tuple[int, bool]:
    """Run sequences with different settings in one pass, one of them greedy, that end at different times."""
    looped, plain, step = engines(capture, sequences=4)
    replies = []
    for engine in (looped, plain):
        tokens: dict[int, list[int]] = {}
        for place, sampling in enumerate((*DRAWN[1:3], DRAWN[4], SamplingParams())):
            request = Request((place, *PROMPT), sampling, 6 + 3 * place)
            tokens[engine.submit(request)] = []
        while engine.has_work:
            for output in engine.step():
                tokens[output.sequence] += output.tokens
        replies.append(list(tokens.values()))
    return step.calls, replies[0] == replies[1]


def test_each_sequence_of_a_pass_has_its_settings(interpret: Interpret) -> None:
    calls, same = interpret(mixed, "runs-when-captured")  # type: ignore[misc]  # the pool carries any result
    assert same and calls >= 14


def biased_replies(capture: str) -> int:
    """Check replies with suppressed and favoured tokens, alone and next to others without."""
    looped, plain, step = engines(capture, sequences=2)
    favoured = tuple((token, 3.3) for token in range(0, 120, 4))
    for others in ({}, {"top_k": 9, "temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.4}):
        free = outcome(plain, PROMPT, 13, sampling=SamplingParams(**others))
        suppressed = tuple((token, -100.0) for token in {token for row in free[0] for token in row})
        for biases in (suppressed, favoured):
            biased = SamplingParams(**others, logit_bias=biases)
            replies = []
            for engine in (looped, plain):
                numbers = [
                    engine.submit(Request((*PROMPT,), params, 13)) for params in (biased, SamplingParams(**others))
                ]
                tokens: dict[int, list[int]] = {number: [] for number in numbers}
                while engine.has_work:
                    for output in engine.step():
                        tokens[output.sequence] += output.tokens
                replies.append(list(tokens.values()))
            assert replies[0] == replies[1] and replies[0][0] != replies[0][1], biases
            assert biases is favoured or not {token for token, _ in suppressed} & {*replies[0][0]}
    return step.calls


@pytest.mark.parametrize("capture", chosen(list(CAPTURES), quick=["runs-when-captured"]))
def test_biases_are_added_on_the_device(capture: str, interpret: Interpret) -> None:
    calls = interpret(biased_replies, capture)
    assert isinstance(calls, int) and calls >= 6 * 12


def left_out() -> tuple[int, int]:
    """Check that the host handles two biases of a token, and everything if rotary tables change with the length."""
    looped, plain, step = engines("none")
    biased = SamplingParams(temperature=1.0, seed=1, logit_bias=((3, 2.0), (3, 1.0)))
    assert outcome(looped, PROMPT, 9, sampling=biased) == outcome(plain, PROMPT, 9, sampling=biased)
    calls = step.calls
    dynamic = replace(looped.runner.config, rope_scaling=RopeScaling("dynamic", 2.0, original_context=16))
    looped.runner._rope = Rope(dynamic, 64, CPU, torch.float32)
    assert outcome(looped, PROMPT, 9) == outcome(plain, PROMPT, 9)
    return calls, step.calls


def test_biases_and_moving_tables_are_the_hosts(interpret: Interpret) -> None:
    assert interpret(left_out) == (0, 0)


def shared_times() -> list[float]:
    looped, _, _ = engines("none")
    return generate(looped, Request(tuple(PROMPT), limit=1 + 2 * STEPS + 1))[1].token_seconds


def test_the_tokens_of_a_launch_share_its_time(interpret: Interpret) -> None:
    seconds = interpret(shared_times)
    assert isinstance(seconds, list) and len(seconds) == 2 * STEPS + 2 and min(seconds) > 0
    assert [len(set(seconds[start : start + STEPS])) for start in (1, 1 + STEPS)] == [1, 1]
    assert len(set(seconds)) == 4


def graphs() -> tuple[int, int, int]:
    captures: list[Launches] = []

    def capture(work: Launches) -> Launches:
        """Record the call with its buffers: a graph stores addresses, not values."""
        captures.append(work)
        out = work()
        return lambda: out

    model = Sequences()
    step = Step(model)
    loop = DeviceLoop(step, capture)
    engine = Engine(ModelRunner(model, passes=looping(model, step, loop)), CacheShape.contiguous(64), VOCAB)
    counts = []
    for limit in (1 + STEPS, 1 + STEPS, 1 + 3 * STEPS):
        generate(engine, Request(tuple(PROMPT), limit=limit))
        counts.append(len(captures))
    captures.clear()
    del engine
    gc.collect()
    return counts[0], counts[2], len(loop._buffers)


def test_the_second_launch_of_a_kind_is_captured_and_goes_with_its_cache(interpret: Interpret) -> None:
    assert interpret(graphs) == (0, 1, 0)


def fused() -> list[list[list[int]]]:
    """Return TokenSteps of the real pass: several per launch, one per launch, and on the host."""
    from mycli.runtime.engine.passes.fused import FusedStep
    from tests.support.decode_models import Case, models

    found = []
    for kind in ("loop", "host"):
        model, _ = models(Case({"layers": 1, "heads": 2, "kv_heads": 1, "hidden_size": 64}, sequences=2, int8=True))
        step = FusedStep.compile(model)
        assert isinstance(step, FusedStep)
        way = UncomparedPass(step, PlainPass(model), None)
        way.loop = DeviceLoop(step, None) if kind == "loop" else None
        passes = Passes((way, PlainPass(model)), {})
        engine = Engine(ModelRunner(model, passes=passes), CacheShape.contiguous(32, 2), model.config.vocab_size - 3)
        found.append(together(engine, [Request((token,), limit=6) for token in (5, 9)]))
    return found


@pytest.mark.slow
def test_the_fused_pass_in_a_loop(interpret: Interpret) -> None:
    ours, theirs = interpret(fused)  # type: ignore[misc]  # the pool carries any result
    assert ours == theirs and len({token for row in ours for token in row}) > 2


def compiled(trouble: str) -> tuple[bool, list[Declined]]:
    """Return whether a model gets a loop, and the reported messages."""
    model, reported = Sequences(), list[Declined]()
    patch = pytest.MonkeyPatch()
    if trouble == "wrong":
        patch.setattr(device_loop, "sample_tokens", lambda *_, **__: None)
    loop = compile_loop(model, Step(model), None, reported.append)
    patch.undo()
    return loop is not None, reported


def test_a_loop_is_used_where_the_device_chooses_as_torch_does(interpret: Interpret) -> None:
    assert interpret(compiled, "") == (True, [])
    loop, reported = interpret(compiled, "wrong")  # type: ignore[misc]  # the pool carries any result
    assert not loop and reported[0].code == "greedy-differs"
    loop, reported = compiled("no kernel for this device")  # Triton has no CPU target
    assert not loop and reported[0].code == "device-loop-failed" and "\n" not in str(reported[0].data["error"])


def failing(when: int) -> list[Declined]:
    """Check that replies equal the host's if the `when`-th launch fails, during capture or replay."""
    warnings: list[Declined] = []
    calls = 0

    def capture(work: Launches) -> Launches:
        def replayed() -> Tensor:
            nonlocal calls
            calls += 1
            if calls == when:
                raise RuntimeError("an illegal instruction was encountered\nmore")
            return work()

        if when == 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return replayed

    looped, plain = Sequences(), Sequences()
    step = Step(looped)
    passes = looping(looped, step, DeviceLoop(step, capture, warnings.append))
    shape = CacheShape.contiguous(64)
    engines = [
        Engine(ModelRunner(looped, passes=passes), shape, VOCAB),
        Engine(ModelRunner(plain), shape, VOCAB),
    ]
    for prompt in (PROMPT, [*PROMPT, 7]):
        found = [outcome(engine, prompt, 40) for engine in engines]
        assert found[0] == found[1], when
    return warnings


@pytest.mark.parametrize("when", [0, 1, 2, 5])
def test_a_launch_that_fails_leaves_the_tokens_to_the_host(when: int, interpret: Interpret) -> None:
    (warning,) = interpret(failing, when)  # type: ignore[misc]  # the pool carries any result
    assert warning.code == "device-loop-failed" and "\n" not in str(warning.data["error"])
