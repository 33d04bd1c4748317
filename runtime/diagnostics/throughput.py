"""Measures throughput with synthetic tokens, as llama-bench does, and compares runs.

pp: prompt tokens per second; tg: generated tokens per second; depth: tokens already in the cache.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mycli.runtime.device.bandwidth import record_bandwidth
from mycli.runtime.device.placement import free_memory
from mycli.runtime.device.probe import cpu_name
from mycli.runtime.diagnostics.memory_check import MemoryMeter
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.sequence import Request
from mycli.runtime.kernels.cpu.matmul import memory_bandwidth
from mycli.runtime.layers.streamed_experts import ExpertReads
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.memory.ceiling import bytes_per_step
from mycli.runtime.memory.plan import MemoryPlan

MEASURED_BYTES = 1 << 30  # larger than any cache; less where memory is short
_READS = 5
# Student's t, 97.5 %, for 1 to 30 degrees of freedom: two-sided 95 % intervals. Beyond 30 the last is a bit too wide.
T_975 = (
    (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    + (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)
    + (2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
)


@dataclass(frozen=True)
class Trial:
    """One row: `prompt` tokens computed or `generate` tokens generated (the other is 0) after `depth` tokens."""

    prompt: int
    generate: int
    depth: int = 0
    sequences: int = 1

    @property
    def name(self) -> str:
        name = f"pp{self.prompt}" if self.prompt else f"tg{self.generate}"
        depth = f" @ d{self.depth}" if self.depth else ""
        return name + depth + (f" x{self.sequences}" if self.sequences > 1 else "")

    @property
    def context(self) -> int:
        return self.depth + self.prompt + self.generate + 1


@dataclass(frozen=True)
class Result:
    """Measurements of a trial. rates: tokens per second of the whole batch, one per repetition.

    warmup_seconds: the first run, which compiles and allocates, and is not counted; peak_bytes: of process or device;
    experts: reads from disk, if not all are in memory.
    """

    trial: Trial
    rates: tuple[float, ...]
    first_token_seconds: tuple[float, ...]
    token_seconds: tuple[float, ...]
    warmup_seconds: float
    peak_bytes: int
    experts: ExpertReads | None = None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rates)

    @property
    def sigma(self) -> float:
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0

    def read_rate(self, plan: MemoryPlan) -> float | None:
        """Return the GB/s of weights and cache read while generating; None for a prompt, which is not bound by it."""
        if not self.trial.generate:
            return None
        middle = self.trial.depth + self.trial.generate // 2
        return bytes_per_step(plan, middle) * self.mean / self.trial.sequences / 1e9


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile of `values` by the nearest-rank method."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def grid(
    prompts: Sequence[int], generates: Sequence[int], depths: Sequence[int], batches: Sequence[int]
) -> list[Trial]:
    """Return all combinations: for each batch and depth the prompts, then the replies; lengths of 0 are skipped."""
    trials = []
    for batch in batches:
        for depth in depths:
            trials += [Trial(count, 0, depth, batch) for count in prompts if count]
            trials += [Trial(0, count, depth, batch) for count in generates if count]
    return trials


class _Test:
    # An engine with a cache of its own. Prompts are random, so that no repetition finds the last one in the cache.
    def __init__(self, runner: ModelRunner, trial: Trial) -> None:
        self._trial = trial
        self._vocab = runner.config.vocab_size
        self._random = random.Random(0)
        self._engine = Engine(runner, CacheShape.contiguous(trial.context, trial.sequences), self._vocab)
        self._depths = [self._tokens(trial.depth) for _ in range(trial.sequences)]
        if trial.depth:
            self._run(self._depths, 0)
        self._last: list[int] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(count)]

    def _run(self, prompts: Sequence[Sequence[int]], limit: int) -> list[float]:
        for prompt in prompts:
            self._engine.submit(Request(tuple(prompt), limit=limit))
        seconds = []
        while self._engine.has_work:
            count = max((len(output.tokens) for output in self._engine.step()), default=0) or 1
            seconds += [self._engine.step_seconds / count] * count  # several tokens of a step share its time
        return seconds

    def once(self) -> list[float]:
        """Return the seconds per token of one repetition; of a prompt the total, with the token after it."""
        trial = self._trial
        fresh = [self._tokens(trial.prompt or 1) for _ in self._depths]
        for new, last in zip(fresh, self._last, strict=False):
            if new[0] == last:  # an equal token would be found in the cache
                new[0] = (new[0] + 1) % self._vocab
        self._last = [new[0] for new in fresh]
        seconds = self._run([[*old, *new] for old, new in zip(self._depths, fresh, strict=True)], trial.generate or 1)
        return [sum(seconds)] if trial.prompt else seconds


def run_trial(
    runner: ModelRunner,
    trial: Trial,
    repetitions: int,
    progress: Callable[[int], None] = lambda repetition: None,
) -> Result:
    """Run `trial` once to warm up and then `repetitions` times; greedy, without stop tokens.

    The rate of a prompt is its tokens over the time to the first token. The rate of a reply counts every decode step:
    the prompt before it is one token, the rest is in the cache.
    """
    meter = MemoryMeter(runner.device)
    meter.begin()
    test = _Test(runner, trial)
    warmup = sum(test.once())
    rates, first, tokens = [], [], []
    reads = runner.model.expert_reads
    before = None if reads is None else replace(reads)
    for repetition in range(repetitions):
        progress(repetition)
        seconds = test.once()
        rates.append((trial.prompt or trial.generate) * trial.sequences / sum(seconds))
        if trial.prompt:
            first.append(seconds[0])
        else:
            tokens += seconds
    experts = None if reads is None or before is None else reads.since(before)
    return Result(trial, tuple(rates), tuple(first), tuple(tokens), warmup, meter.highest(), experts)


@dataclass(frozen=True)
class Change:
    """The relative change of the mean, with its 95 % interval; -0.05 is 5 % slower."""

    relative: float
    low: float
    high: float

    def regressed(self, limit: float) -> bool:
        """Return whether it is slower by more than `limit`, and the whole interval is below zero."""
        return self.relative < -limit and self.high < 0


def compare(old: Sequence[float], new: Sequence[float]) -> Change:
    """Return Welch's t interval of the difference of means, relative to the old mean."""
    before, after = statistics.fmean(old), statistics.fmean(new)
    relative = after / before - 1
    if min(len(old), len(new)) < 2:  # one repetition has no variance
        return Change(relative, -math.inf, math.inf)
    a, b = statistics.variance(old) / len(old), statistics.variance(new) / len(new)
    if a + b == 0:
        return Change(relative, relative, relative)
    freedom = (a + b) ** 2 / (a**2 / (len(old) - 1) + b**2 / (len(new) - 1))
    half = T_975[min(max(int(freedom), 1), len(T_975)) - 1] * math.sqrt(a + b) / before
    return Change(relative, relative - half, relative + half)


def measure_bandwidth(device: torch.device, nbytes: int) -> float:
    """Return the GB/s at which `device` reads `nbytes` of memory: the best of several.

    CPU: a native reduction, or a matrix-vector product without native code; GPU: a copy, whose reads and writes count.
    """
    if device.type == "cpu":
        rate = memory_bandwidth(nbytes, _READS)
        if rate is not None:
            return rate / 1e9
    columns = 4096
    matrix = torch.ones(max(nbytes // 4 // columns, 1), columns, dtype=torch.float32, device=device)
    moved = matrix.nbytes * (2 if device.type == "cuda" else 1)
    vector = torch.ones(columns, device=device)
    target = torch.empty_like(matrix) if device.type == "cuda" else None
    best = math.inf
    for _ in range(_READS + 1):
        began = time.perf_counter()
        if target is None:
            torch.mv(matrix, vector)
        else:
            target.copy_(matrix)
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return moved / best / 1e9


def current_bandwidth(device: torch.device) -> float:
    """Return the GB/s at which `device` reads more than its caches hold, now: other programs take a part."""
    return measure_bandwidth(device, min(MEASURED_BYTES, free_memory(device) // 4))


def record_device(device: torch.device, state: Path, gigabytes_per_second: float) -> tuple[str, float]:
    """Return the name of `device` and the best GB/s ever measured on it; stored in `state` for estimates."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return name, record_bandwidth(state, name, gigabytes_per_second)
