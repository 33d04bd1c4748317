"""Test several decode steps per launch of models with recurrent states: replies and later turns are the plain pass's.

Token selection runs in the Triton interpreter, and a recording replaces the CUDA graph.
"""

import random
from pathlib import Path

import pytest
import torch

from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.pass_choices import pass_choices
from mycli.runtime.engine.passes import Passes
from mycli.runtime.engine.passes.captured import CapturedStep
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.engine.sequence import Request
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import KEY_BLOCK
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.params import SamplingParams
from tests.support.families import CASES, make
from tests.support.graphs import recording
from tests.support.grids import chosen
from tests.support.native_parts import WIDE, load_bf16, need_native_code
from tests.support.triton_interpreter import Interpret, interpret

pytest.importorskip("triton")

from mycli.runtime.engine.passes.cuda import CudaPass  # noqa: E402  (only where Triton is)
from mycli.runtime.engine.passes.device_loop import STEPS, DeviceLoop  # noqa: E402  (as above)
from mycli.runtime.engine.passes.graphs import Launches  # noqa: E402  (as above)

__all__ = ["interpret"]

FAMILIES = ["qwen3_5-delta", "lfm2", "falcon_h1-multipliers", "kimi_linear-8top3"]
PROMPT = (7, 9, 11, 30, 5)


class Counting(DeviceLoop):
    """Counts launches and the steps in them."""

    launches = steps = 0

    def _launch(self, buffers, work, filters, steps):  # type: ignore[no-untyped-def]
        self.launches, self.steps = self.launches + 1, self.steps + steps
        return super()._launch(buffers, work, filters, steps)


def loaded(folder: str, case: str) -> Transformer:
    name = next(name for name in CASES if name.startswith(case))
    model_type, changes = CASES[name]
    make(Path(folder), model_type, {**WIDE, **changes, "max_position_embeddings": 256})
    return load_bf16(Path(folder)).model


def engines(model: Transformer, capture=recording, blocks: int = 7) -> tuple[Engine, Engine, Counting, list[Declined]]:  # type: ignore[no-untyped-def]
    """Return an engine with the loop, one that samples on the host, the loop and what is reported."""
    step, plain, reported = CapturedStep(model), PlainPass(model), list[Declined]()
    way = CudaPass(step, plain, recording, lambda declined: pytest.fail(declined.code), name="captured")
    way.loop = loop = Counting(step, capture, reported.append)
    shape = CacheShape(192, blocks, KEY_BLOCK)
    looped, host = (
        Engine(ModelRunner(model, passes=passes), shape, model.config.vocab_size, running=6)
        for passes in (Passes((way, plain), {}), Passes((plain,), {}))
    )
    return looped, host, loop, reported


def said(engine: Engine, request: Request, take: int = 999) -> tuple[list[int], int, str | None]:
    """Return the tokens of a reply of which `take` are read, how many of the prompt were cached, and why it ended."""
    number, tokens, cached, reason = engine.submit(request), list[int](), 0, None
    while engine.has_work:
        for output in engine.step():
            tokens += output.tokens
            cached, reason = max(cached, output.cached_tokens), output.finish_reason
        if len(tokens) >= take:
            engine.cancel(number)
            take = 999
    return tokens, cached, reason


@torch.inference_mode()
def ends(folder: str, case: str) -> int:
    """End replies at a stop token, a limit or by leaving at every place; each next turn resumes at that state."""
    model = loaded(folder, case)
    looped, host, loop, reported = engines(model)
    sampling = SamplingParams(temperature=1.0, seed=3)
    reply = said(host, Request(PROMPT, sampling, 2 * STEPS + 3))[0]
    assert len(set(reply)) == len(reply), "a stop token has one place"
    for place, token in enumerate(reply):
        for request, take in (
            (Request(PROMPT, sampling, 2 * STEPS + 3, frozenset((token, 2))), 999),
            (Request(PROMPT, sampling, place + 1), 999),
            (Request(PROMPT, sampling, 2 * STEPS + 3), place + 1),
        ):
            for engine in (looped, host):
                engine.forget()
            ours, theirs = (said(engine, request, take) for engine in (looped, host))
            assert ours[0][: len(theirs[0])] == theirs[0] and (take < 999 or ours == theirs), (place, take)
            turn = Request((*PROMPT, *ours[0], 5, 6), sampling, 6)
            after, alone = said(looped, turn), said(engines(model)[1], turn)
            assert after[0] == alone[0] and after[1] >= len(PROMPT) + len(ours[0]) - 1, (place, take)
    assert not reported and loop.steps > 1.5 * loop.launches
    return loop.steps


@pytest.mark.parametrize("case", chosen(FAMILIES[:2], quick=FAMILIES[:1]))
def test_a_later_turn_resumes_at_the_state_of_every_ending(case: str, tmp_path: Path, interpret: Interpret) -> None:
    need_native_code()
    steps = interpret(ends, str(tmp_path), case)
    assert isinstance(steps, int) and steps > 100


@torch.inference_mode()
def served(folder: str, case: str) -> tuple[float, int]:
    """Serve requests that share prefixes, arrive late, stop, are cancelled and preempted."""
    model, found = loaded(folder, case), []
    *both, loop, reported = engines(model)
    for engine in both:
        drawing, tokens, submitted = random.Random(5), dict[int, list[int]](), 0
        while submitted < 14 or engine.has_work:
            for _ in range(drawing.randrange(3) if submitted < 14 and len(engine.scheduler.waiting) < 3 else 0):
                prompt = [7, 9, 11] * (submitted % 3 * 15) + [drawing.randrange(3, 90) for _ in range(9)]
                sampling = SamplingParams(temperature=float(submitted % 2), seed=submitted)
                stops = frozenset(range(submitted, submitted + submitted % 4))
                engine.submit(Request(tuple(prompt), sampling, 5 + 7 * (submitted % 9), stops))
                submitted += 1
            for output in engine.step():
                tokens.setdefault(output.sequence, []).extend(output.tokens)
                if output.sequence % 5 == 4 and len(tokens[output.sequence]) >= 6:
                    engine.cancel(output.sequence)
        found.append({number: reply[: 6 if number % 5 == 4 else None] for number, reply in tokens.items()})
    assert found[0] == found[1] and not reported
    return loop.steps / loop.launches, both[0].stats.preemptions


@pytest.mark.parametrize("case", chosen(FAMILIES, quick=FAMILIES[:1]))
def test_replies_of_a_busy_server_are_the_plain_ones(case: str, tmp_path: Path, interpret: Interpret) -> None:
    need_native_code()
    share, preemptions = interpret(served, str(tmp_path), case)  # type: ignore[misc]  # the pool carries any result
    assert share > 2 and preemptions > 0


@torch.inference_mode()
def failing(folder: str, when: int) -> list[str]:
    """Check that replies are the host's if the `when`-th launch fails: first, captured or replayed."""
    calls, model = 0, loaded(folder, FAMILIES[0])

    def capture(work: Launches) -> Launches:
        def replayed() -> torch.Tensor:
            raise RuntimeError("an illegal instruction was encountered")

        if when == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return replayed

    looped, host, loop, reported = engines(model, capture)
    if when == 0:
        step = loop._step

        class Failing(CapturedStep):
            def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
                nonlocal calls
                calls += 1
                if calls == 3:
                    raise RuntimeError("no such kernel")
                return step(*args, **kwargs)  # type: ignore[arg-type]

        loop._step = Failing(model)
    for limit in (17, 20):
        request = Request(PROMPT, SamplingParams(), limit)
        assert said(looped, request) == said(host, request), when
    return [declined.code for declined in reported]


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_launch_that_fails_leaves_the_states_alone(when: int, tmp_path: Path, interpret: Interpret) -> None:
    need_native_code()
    codes = interpret(failing, str(tmp_path), when)
    assert isinstance(codes, list) and set(codes) == {"no-graph-memory" if when == 1 else "device-loop-failed"}


def test_more_stop_tokens_than_a_launch_compares_are_the_hosts(tmp_path: Path, interpret: Interpret) -> None:
    need_native_code()
    assert interpret(many_stops, str(tmp_path)) == (0, True)


@torch.inference_mode()
def many_stops(folder: str) -> tuple[int, bool]:
    looped, host, loop, _ = engines(loaded(folder, FAMILIES[0]))
    request = Request(PROMPT, SamplingParams(temperature=1.0, seed=3), 20, frozenset(range(20, 37)))
    same = said(looped, request) == said(host, request)
    return loop.steps, same


def test_a_report_says_that_drafts_are_captured_and_tokens_are_sampled_on_the_device(tmp_path: Path) -> None:
    need_native_code()
    choices = {choice.work: choice for choice in pass_choices(engines(loaded(str(tmp_path), FAMILIES[0]))[0].runner)}
    assert choices["verify"].chosen == "captured" and not choices["verify"].declined
    assert all(choices[work].chosen == "captured" and choices[work].makes_tokens for work in ("decode", "sample"))
