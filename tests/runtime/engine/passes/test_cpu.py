"""Test several passes per native call against single passes: the same tokens, ends and keys in each family."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import Passes, cpu
from mycli.runtime.engine.passes.base import Pass, PassInput, TokenSteps
from mycli.runtime.engine.sequence import Request, SequenceOutput
from mycli.runtime.errors import Declined
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.models.config import KvDtype
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import DeviceSampling
from tests.runtime.engine.test_exactness import requests
from tests.support.engines import drain, together
from tests.support.families import CASES, make
from tests.support.grids import chosen
from tests.support.models import random_model
from tests.support.native_parts import HEAD, WIDE, load_bf16, need_native_code
from tests.support.paths import PICO

VOCAB = 512
# Family features that the loop handles: none; layers of one part; embedding and logit factors, one of them rounded;
# experts.
TAKEN: Mapping[str, Mapping[str, Any]] = {
    "llama-biases": {},
    "nemotron-nas-every-kind": {},
    "granite-multipliers": {},
    "gemma3-window7-tied": HEAD,
    "qwen3_moe-8top2": HEAD,
}
DECLINED: Mapping[str, Mapping[str, Any]] = {"gemma2-mqa-low-caps-untied": HEAD, "lfm2-tied": {}, "gpt2-tied": {}}


@pytest.fixture(autouse=True)
def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a call as many passes as there are free blocks for, after the first call, which is measured."""
    need_native_code()
    monkeypatch.setattr(cpu, "CALL_SECONDS", 1e6)


def plain(runner: ModelRunner) -> ModelRunner:
    """Run passes one at a time: the CPU pass without its token loop."""
    native, *others = runner.passes.passes
    return ModelRunner(runner.model, runner.kv, Passes((LogitsOnly(native), *others), {}))


class LogitsOnly:
    name, samples = "logits", False

    def __init__(self, native: Pass) -> None:
        self.native, self.logits = native, native.logits

    def takes(self, work: PassInput) -> Declined | None:
        return Declined("host-sampling") if work.sampling is not None else self.native.takes(work)


def keys(engine: Engine) -> list[Tensor]:
    layers = range(engine.runner.config.layers)
    return [part.data for layer in layers for part in engine.cache.all(layer)]


class Counting:
    """Records how many steps each call of the CPU pass made."""

    name, samples = "counting", False

    def __init__(self, native: cpu.CpuPass) -> None:
        self.native, self.made = native, list[int]()
        self.takes, self.logits = native.takes, native.logits

    def tokens(self, work: PassInput) -> Iterator[TokenSteps]:
        for tokens, seconds in self.native.tokens(work):
            self.made.append(len(tokens))
            yield tokens, seconds


def counting(runner: ModelRunner) -> tuple[ModelRunner, list[int]]:
    native, *others = runner.passes.passes
    assert isinstance(native, cpu.CpuPass)
    way = Counting(native)
    return ModelRunner(runner.model, runner.kv, Passes((way, *others), {})), way.made


def replies(engine: Engine, asked: Sequence[Request]) -> list[tuple[list[int], str | None]]:
    numbers = [engine.submit(one) for one in asked]
    outputs = drain(engine)
    return [([*_tokens(outputs[one])], outputs[one][-1].finish_reason) for one in numbers]


def _tokens(outputs: Sequence[SequenceOutput]) -> Iterator[int]:
    for output in outputs:
        yield from output.tokens


@pytest.mark.parametrize("case", TAKEN)
@pytest.mark.parametrize("kv", chosen(["bf16", "int8", "int4"], ["int8"]))
def test_tokens_and_keys_are_those_of_pass_by_pass(case: str, kv: KvDtype, tmp_path: Path) -> None:
    """Run three sequences of several blocks and discard the tokens computed after the end of one."""
    model_type, changes = CASES[case]
    make(tmp_path, model_type, {**WIDE, **changes, **TAKEN[case]})
    runner, made = counting(load_bf16(tmp_path, kv))
    shape, vocabulary = CacheShape(32, 14, 8), runner.config.vocab_size - 3
    looped, slow = (Engine(one, shape, vocabulary, running=3) for one in (runner, plain(runner)))
    asked = [Request(tuple(range(4 + place, 9 + 3 * place)), limit=14 + place) for place in range(3)]
    expected = replies(slow, asked)
    assert replies(looped, asked) == expected
    assert max(made) >= 8, "passes without a look between them"
    stop = expected[1][0][6]
    ended = [replace(one, stop_ids=frozenset((stop,))) for one in asked]
    assert replies(looped, ended) == replies(slow, ended)
    assert any(reason == "stop" for _, reason in replies(looped, ended))
    alone = (
        Engine(runner, CacheShape.contiguous(32), vocabulary),
        Engine(plain(runner), CacheShape.contiguous(32), vocabulary),
    )
    assert replies(alone[0], asked[:1]) == replies(alone[1], asked[:1])
    assert all(torch.equal(one, other) for one, other in zip(keys(alone[0]), keys(alone[1]), strict=True))


def test_with_too_few_blocks_every_reply_is_the_reply_alone() -> None:
    """The requests share prefixes, are greedy or sampled, and half of them are preempted."""
    runner, made = counting(load_bf16(PICO, "auto"))
    asked = requests(9)
    lane = CacheShape.contiguous(96)
    expected = [together(Engine(plain(runner), lane, runner.config.vocab_size), [one])[0] for one in asked]
    greedy = [one for one in asked if one.sampling.greedy]
    for some in (asked, greedy, asked[::-1]):
        engine = Engine(runner, CacheShape(96, 13, 8), runner.config.vocab_size, running=8, chunk=64)
        found = together(engine, some)
        assert found == [expected[asked.index(one)] for one in some]
        assert engine.scheduler.pool.used == 0 and engine.stats.preemptions > 0
    assert max(made) > 1


def decode(runner: ModelRunner, tokens: Sequence[int], stops: Sequence[int] = (), passes: int = 5) -> list[list[int]]:
    """Return the greedy tokens of one call."""
    engine = Engine(runner, CacheShape.contiguous(32, len(tokens)), VOCAB)
    chunks = [Chunk([token], 0, (place,), 1) for place, token in enumerate(tokens)]
    way = cpu.compile_cpu_pass(runner.model, "auto", lambda declined: None)
    assert isinstance(way, cpu.CpuPass)
    way._seconds[len(tokens)] = 1e-9  # as if measured, so a call may have many passes
    sampling = [DeviceSampling(VOCAB)]
    work = PassInput(chunks, engine.cache, runner.rope(32), None, sampling, passes, [frozenset(stops)] * len(chunks))
    assert way.takes(work) is None
    ((made, _),) = way.tokens(work)
    return made


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load_bf16(random_model(tmp_path_factory.mktemp("loop") / "model"))


def test_a_call_ends_after_a_stop_of_any(small: ModelRunner) -> None:
    every = decode(small, [5, 9])
    assert len(every) == 5 and len({len(row) for row in every}) == 1
    for sequence in range(2):
        stop = every[2][sequence]
        first = next(at for at, row in enumerate(every) if stop in row)
        assert decode(small, [5, 9], (4000, stop)) == every[: first + 1]
    assert decode(small, [5, 9], passes=1) == every[:1]


def test_logits_that_are_no_numbers_end_one_reply_and_no_other(small: ModelRunner) -> None:
    """The third token drawn by the second sequence has a NaN embedding."""
    every = decode(small, [5, 9])
    broken = every[2][1]
    assert all(broken not in row for row in every[:2]) and broken not in (every[2][0], 5, 9)
    model, kept = small.model, small.model.embedding.clone()
    try:
        model.embedding[broken] = torch.nan
        found = decode(small, [5, 9])
        assert found[:3] == every[:3] and found[3] == [every[3][0], -1] and len(found) == 4
        engine = Engine(small, CacheShape.contiguous(32, 2), VOCAB)
        numbers = [engine.submit(Request((token,), limit=8)) for token in (5, 9)]
        outputs = drain(engine)
    finally:
        model.embedding.copy_(kept)
    first, second = (outputs[number] for number in numbers)
    assert second[-1].finish_reason == "error" and second[-1].error is not None
    assert [*_tokens(second)] == [row[1] for row in every[:3]]
    assert first[-1].finish_reason == "length" and [*_tokens(first)][:5] == [row[0] for row in every]


def test_what_is_drawn_counted_or_told_is_made_pass_by_pass(small: ModelRunner) -> None:
    """The loop supports only greedy tokens, so sampling, penalties and logprobs must use single passes."""
    runner, made = counting(small)
    drawn = [DeviceSampling(VOCAB, 0.7)]
    engine = Engine(runner, CacheShape.contiguous(32), VOCAB)
    chunks = [Chunk([5], 0, (0,), 1)]
    assert small.tokens(chunks, drawn, engine.cache, 5, [frozenset()] * len(chunks)) is None
    assert (
        small.tokens(chunks, [replace(drawn[0], temperature=0.0)], engine.cache, 5, [frozenset()] * len(chunks))
        is not None
    )
    for sampling in (SamplingParams(0.7, seed=3), SamplingParams(repetition_penalty=1.5)):
        request = Request((5, 6), sampling, 8)
        assert together(engine, [request]) == together(
            Engine(plain(runner), CacheShape.contiguous(32), VOCAB), [request]
        )
    told = Request((5, 6), limit=8, logprobs=2)
    assert not made
    (number,), outputs = [engine.submit(told)], drain(engine)
    assert not made and sum(len(one.logprobs) for one in outputs[number]) == 8


@pytest.mark.parametrize("case", DECLINED)
def test_what_native_code_does_not_take_whole_is_left_to_passes(case: str, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    make(tmp_path, model_type, {**WIDE, **changes, **DECLINED[case]})
    loaded = load_bf16(tmp_path)
    runner, made = counting(loaded)
    request = Request((5, 6, 7), limit=6)
    shape = CacheShape.contiguous(32)
    looped, slow = (Engine(one, shape, runner.config.vocab_size) for one in (runner, plain(runner)))
    assert together(looped, [request]) == together(slow, [request]) and not made


def test_a_call_is_as_long_as_passes_fit_its_time(small: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call for a batch size makes one pass, and so does the call after a slow one."""
    now = [0.0]
    monkeypatch.setattr(cpu, "CALL_SECONDS", 5 / 1024)
    monkeypatch.setattr(cpu.time, "perf_counter", lambda: now[0])
    seconds, made = [0.0], list[int]()

    def scripted(library: object, chain: object, head: object, loop: object, rows: object, last: object, passes: int):
        now[0] += passes * seconds[0]
        made.append(passes)
        return [[3]] * passes

    monkeypatch.setattr(cpu, "run_passes", scripted)
    way = cpu.compile_cpu_pass(small.model, "auto", lambda declined: None)
    assert isinstance(way, cpu.CpuPass)
    cache, chunks, greedy = (
        small.make_cache(CacheShape.contiguous(32)),
        [Chunk([5], 0, (0,), 1)],
        [DeviceSampling(VOCAB)],
    )

    def call(count: int) -> None:
        list(way.tokens(PassInput(chunks, cache, small.rope(32), None, greedy, count)))

    for seconds[0] in (1 / 1024, 1 / 1024, 0.02, 1 / 1024, 1 / 1024, 1 / 1024):
        call(4)
    assert made == [1, 4, 4, 1, 4, 4]
    call(100)
    assert made[-1] == 5
