"""Test that the benchmark measures the intended work and computes standard statistics."""

import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mycli.runtime.cache.batch import Batch
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.bandwidth import recorded_bandwidth
from mycli.runtime.device.placement import Placement
from mycli.runtime.device.probe import cpu_name
from mycli.runtime.diagnostics import throughput as bench
from mycli.runtime.diagnostics.throughput import (
    T_975,
    Result,
    Trial,
    compare,
    current_bandwidth,
    grid,
    measure_bandwidth,
    percentile,
    record_device,
)
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.ceiling import bytes_per_step
from mycli.runtime.memory.plan import MemoryPlan
from tests.support.paths import PICO

CPU = torch.device("cpu")
Passes = list[tuple[int, int, int]]


@pytest.fixture(scope="module")
def pico() -> ModelRunner:
    return load_model(open_model_folder(PICO), Placement(torch.device("cpu"), torch.float32))


@pytest.fixture
def passes(pico: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> Passes:
    """Return every pass as (sequences, start, new tokens per sequence)."""
    seen: Passes = []
    forward = Transformer.forward

    def spy(self: Transformer, batch: Batch, rope: Rope, cache: KVCache, *others: Any) -> torch.Tensor:
        seen.append((len(batch.chunks), batch.chunks[0].start, batch.chunks[0].count))
        return forward(self, batch, rope, cache, *others)

    monkeypatch.setattr(Transformer, "forward", spy)
    return seen


def test_a_prompt_is_prefilled_whole_each_time(pico: ModelRunner, passes: Passes) -> None:
    result = bench.run_trial(pico, Trial(prompt=20, generate=0), repetitions=3)
    assert passes == [(1, 0, 20)] * 4  # one warm-up run
    assert len(result.rates) == len(result.first_token_seconds) == 3 and not result.token_seconds


def test_depth_is_prefilled_once_and_each_prompt_starts_there(pico: ModelRunner, passes: Passes) -> None:
    bench.run_trial(pico, Trial(prompt=20, generate=0, depth=30, sequences=2), repetitions=3)
    assert passes == [(2, 0, 30)] + [(2, 30, 20)] * 4


def test_every_token_of_a_reply_is_one_decoding_step(pico: ModelRunner, passes: Passes) -> None:
    result = bench.run_trial(pico, Trial(prompt=0, generate=5, depth=30), repetitions=2)
    assert passes == [(1, 0, 30)] + [(1, 30 + step, 1) for step in range(5)] * 3
    assert len(result.token_seconds) == 10 and not result.first_token_seconds


def test_a_reply_from_nothing(pico: ModelRunner, passes: Passes) -> None:
    bench.run_trial(pico, Trial(prompt=0, generate=3), repetitions=1)
    assert passes == [(1, step, 1) for step in range(3)] * 2


@pytest.mark.parametrize(
    "trial, rate", [(Trial(20, 0), 20.0), (Trial(20, 0, 8, 3), 60.0), (Trial(0, 4), 1.0), (Trial(0, 4, 8, 3), 3.0)]
)
def test_rates_are_tokens_over_seconds(
    pico: ModelRunner, monkeypatch: pytest.MonkeyPatch, trial: Trial, rate: float
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))  # each token takes one second
    result = bench.run_trial(pico, trial, repetitions=2)
    assert result.rates == (rate, rate)
    assert (result.mean, result.sigma) == (rate, 0.0)
    assert result.peak_bytes > 0


def test_the_same_prompt_twice_would_be_cached_so_it_never_is(
    pico: ModelRunner, passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.random.Random, "randrange", lambda self, stop: 7)
    bench.run_trial(pico, Trial(prompt=4, generate=0), repetitions=2)
    assert passes == [(1, 0, 4)] * 3


def test_grid_is_every_combination() -> None:
    assert [trial.name for trial in grid([512, 0], [128], [0, 1024], [1, 4])] == [
        "pp512",
        "tg128",
        "pp512 @ d1024",
        "tg128 @ d1024",
        "pp512 x4",
        "tg128 x4",
        "pp512 @ d1024 x4",
        "tg128 @ d1024 x4",
    ]


def test_read_rate_counts_weights_and_the_cache_at_the_middle(pico: ModelRunner) -> None:
    plan = MemoryPlan(pico.config)
    one = Result(Trial(0, 10, 100), (50.0,), (), (), 0.0, 0)
    assert one.read_rate(plan) == pytest.approx(50 * bytes_per_step(plan, 105) / 1e9)
    four = Result(Trial(0, 10, 100, 4), (200.0,), (), (), 0.0, 0)
    assert four.read_rate(MemoryPlan(pico.config, batch=4)) == pytest.approx(
        50 * bytes_per_step(MemoryPlan(pico.config, batch=4), 105) / 1e9
    )
    assert Result(Trial(10, 0), (50.0,), (), (), 0.0, 0).read_rate(plan) is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_percentile_is_a_value_that_enough_others_stay_under(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_t_table() -> None:
    assert [round(float(stats.t.ppf(0.975, freedom)), 3) for freedom in range(1, 31)] == list(T_975)


@pytest.mark.parametrize(
    "old, new",
    [([10.0, 11, 12, 10, 11], [12.0, 13, 12.5, 14, 13]), ([5.0, 6], [5.0, 5.5, 9, 1]), ([1.0, 1.1], [5.0, 5.001])],
)
def test_interval_is_welchs_or_a_little_wider(old: list[float], new: list[float]) -> None:
    change = compare(old, new)
    mean = sum(old) / len(old)
    exact = stats.ttest_ind(new, old, equal_var=False).confidence_interval(0.95)
    assert change.relative == pytest.approx(sum(new) / len(new) / mean - 1)
    assert change.low <= exact.low / mean + 1e-3 and change.high >= exact.high / mean - 1e-3
    assert change.high - change.low < 4 * (exact.high - exact.low) / mean


@pytest.mark.parametrize(
    "old, new, regressed",
    [
        ([100.0, 101, 99], [80.0, 81, 79], True),
        ([100.0, 101, 99], [97.0, 98, 96], False),  # less than the limit
        ([100.0, 150, 50], [80.0, 130, 30], False),  # within the noise
        ([100.0], [50.0], False),  # a single run is not significant
        ([100.0, 100], [90.0, 90], True),
        ([100.0, 101], [120.0, 121], False),
    ],
)
def test_a_regression_is_large_and_not_by_chance(old: list[float], new: list[float], regressed: bool) -> None:
    assert compare(old, new).regressed(0.05) is regressed


def test_one_repetition_has_no_spread_and_no_interval() -> None:
    assert Result(Trial(1, 0), (3.0,), (), (), 0.0, 0).sigma == 0.0
    assert compare([1.0], [2.0]).low == -math.inf


def test_bandwidth_is_plausible() -> None:
    assert 0.1 < measure_bandwidth(CPU, 1 << 24) < 10_000


def test_bandwidth_is_that_of_the_best_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has no native code; reads of 4 MiB take 9, 2 and 5 ms."""
    moments = itertools.accumulate([0, 9e-3, 1, 2e-3, 1, 5e-3])
    monkeypatch.setattr(bench, "memory_bandwidth", lambda nbytes, repetitions: None)
    monkeypatch.setattr(bench, "_READS", 2)
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    assert measure_bandwidth(CPU, 1 << 22) == pytest.approx((1 << 22) / 2e-3 / 1e9)


def test_the_best_rate_of_a_device_is_recorded(tmp_path: Path) -> None:
    for rate, best in ((12.0, 12.0), (36.0, 36.0), (30.0, 36.0)):
        assert record_device(CPU, tmp_path / "state", rate) == (cpu_name(), best)
    assert recorded_bandwidth(tmp_path / "state", cpu_name()) == 36


def test_memory_is_measured_beyond_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def measure(device: torch.device, nbytes: int) -> float:
        sizes.append(nbytes)
        return 20.0

    monkeypatch.setattr(bench, "measure_bandwidth", measure)
    monkeypatch.setattr(bench, "free_memory", lambda device: 1 << 40)
    assert current_bandwidth(CPU) == 20
    monkeypatch.setattr(bench, "free_memory", lambda device: 1 << 20)
    current_bandwidth(CPU)
    assert sizes == [1 << 30, 1 << 18]


def test_where_nothing_can_be_noted_down_it_is_measured_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    assert record_device(CPU, tmp_path / "state", 20.0) == (cpu_name(), 20.0)
