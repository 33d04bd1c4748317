"""How fast a model is: prompts and replies of synthetic tokens through the one generator, timed.

Follows llama-bench's tests (pp: tokens of a prompt per second; tg: tokens generated per second; depth: tokens already
in the cache). Every repetition is kept, so that two runs can be compared with an interval. Knows the generator and
clocks; does not print and does not know file formats.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mycli.runtime.device.bandwidth import remember
from mycli.runtime.device.placement import free_memory
from mycli.runtime.device.probe import cpu_name
from mycli.runtime.diagnostics.memory_check import MemoryMeter
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import CacheShape, ModelRunner
from mycli.runtime.engine.sequence import Request
from mycli.runtime.kernels.cpu.matmul import memory_bandwidth
from mycli.runtime.layers.streamed_experts import ExpertReads
from mycli.runtime.memory.ceiling import bytes_per_step
from mycli.runtime.memory.plan import MemoryPlan

MEASURED_BYTES = 1 << 30  # larger than any cache; less where memory is short
# Student's t, 97.5 %, for 1 to 30 degrees of freedom: two-sided 95 % intervals. Beyond 30 the last is a bit too wide.
T_975 = (
    (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    + (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)
    + (2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
)


@dataclass(frozen=True)
class Trial:
    """One row: `prompt` tokens are prefilled or `generate` tokens made (the other is 0), `depth` tokens lie before."""

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
    """What was measured. `rates` are tokens per second, one per repetition, over the whole batch; times in seconds.

    `warmup_seconds` is the first run, which compiles, allocates and is not counted; `peak_bytes` of process or device;
    `experts`: how they were found, where not all are in memory.
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
        """GB/s of weights and cache that generating read; None for a prompt, which is not bound by reading."""
        if not self.trial.generate:
            return None
        middle = self.trial.depth + self.trial.generate // 2
        return bytes_per_step(plan, middle) * self.mean / self.trial.sequences / 1e9


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of `values` (not empty) do not exceed: nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def grid(
    prompts: Sequence[int], generates: Sequence[int], depths: Sequence[int], batches: Sequence[int]
) -> list[Trial]:
    """Every combination: for each batch and depth, the prompts and then the replies; a length of 0 asks for none."""
    trials = []
    for batch in batches:
        for depth in depths:
            trials += [Trial(count, 0, depth, batch) for count in prompts if count]
            trials += [Trial(0, count, depth, batch) for count in generates if count]
    return trials


class _Test:
    def __init__(self, runner: ModelRunner, trial: Trial, seed: int) -> None:
        self._trial = trial
        self._vocab = runner.config.vocab_size
        self._random = random.Random(seed)
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
            made = max((len(output.tokens) for output in self._engine.step()), default=0) or 1
            seconds += [self._engine.step_seconds / made] * made
        return seconds

    def once(self) -> list[float]:
        """Seconds per token of one repetition, for a prompt of all of it, with the token after it."""
        trial = self._trial
        fresh = [self._tokens(trial.prompt or 1) for _ in self._depths]
        for new, last in zip(fresh, self._last, strict=False):
            if new[0] == last:  # an equal token would be taken from the cache
                new[0] = (new[0] + 1) % self._vocab
        self._last = [new[0] for new in fresh]
        seconds = self._run([[*old, *new] for old, new in zip(self._depths, fresh, strict=True)], trial.generate or 1)
        return [sum(seconds)] if trial.prompt else seconds


def run_trial(
    runner: ModelRunner,
    trial: Trial,
    repetitions: int,
    seed: int = 0,
    progress: Callable[[int], None] = lambda repetition: None,
) -> Result:
    """Run `trial` once to warm up and `repetitions` times for the record; greedy, no stop token, monotonic clock.

    A prompt's rate is its tokens over the time to the first token, sampling included. A reply's rate counts every
    decoding step: the prompt before it is one token, all the rest lies in the cache.
    """
    meter = MemoryMeter(runner.device)
    meter.begin()
    test = _Test(runner, trial, seed)
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
    found = None if reads is None or before is None else reads.since(before)
    return Result(trial, tuple(rates), tuple(first), tuple(tokens), warmup, meter.highest(), found)


@dataclass(frozen=True)
class Change:
    """New against old: relative change of the mean, and the 95 % interval it lies in. -0.05 is 5 % slower."""

    relative: float
    low: float
    high: float

    def regressed(self, limit: float) -> bool:
        """Slower by more than `limit`, and not by chance: the whole interval lies below zero."""
        return self.relative < -limit and self.high < 0


def compare(old: Sequence[float], new: Sequence[float]) -> Change:
    """Welch's t interval of the difference of means, relative to the old mean.

    One repetition on either side says nothing about chance: the interval is then unbounded.
    """
    before, after = statistics.fmean(old), statistics.fmean(new)
    relative = after / before - 1
    if min(len(old), len(new)) < 2:
        return Change(relative, -math.inf, math.inf)
    a, b = statistics.variance(old) / len(old), statistics.variance(new) / len(new)
    if a + b == 0:
        return Change(relative, relative, relative)
    freedom = (a + b) ** 2 / (a**2 / (len(old) - 1) + b**2 / (len(new) - 1))
    half = T_975[min(max(int(freedom), 1), len(T_975)) - 1] * math.sqrt(a + b) / before
    return Change(relative, relative - half, relative + half)


def measure_bandwidth(device: torch.device, nbytes: int, repetitions: int = 5) -> float:
    """GB/s at which memory of `device` is read by a plain reduction over `nbytes`: the best of `repetitions`.

    On the CPU our own code, or a matrix-vector product where that cannot be built; on a GPU a copy, whose reading and
    writing both count.
    """
    if device.type == "cpu":
        found = memory_bandwidth(nbytes, repetitions)
        if found is not None:
            return found / 1e9
    columns = 4096
    matrix = torch.ones(max(nbytes // 4 // columns, 1), columns, dtype=torch.float32, device=device)
    moved = matrix.nbytes * (2 if device.type == "cuda" else 1)
    vector = torch.ones(columns, device=device)
    target = torch.empty_like(matrix) if device.type == "cuda" else None
    best = math.inf
    for _ in range(repetitions + 1):
        began = time.perf_counter()
        if target is None:
            torch.mv(matrix, vector)
        else:
            target.copy_(matrix)
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return moved / best / 1e9


def measure_device(device: torch.device, state: Path, seen: float = 0.0) -> tuple[str, float]:
    """The name of `device` and the GB/s at which it reads: the best that was ever measured or `seen` on it.

    It is noted down in the folder `state` for estimates.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    measured = measure_bandwidth(device, min(MEASURED_BYTES, free_memory(device) // 4))
    return name, remember(state, name, max(measured, seen))
