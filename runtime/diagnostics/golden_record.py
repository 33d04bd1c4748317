"""Records replies and speed of a model, and says what an update of this program changed."""

import hashlib
import json
import random
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.probe import cpu_name
from mycli.runtime.device.system import cpu_wait_seconds
from mycli.runtime.diagnostics.prompts import QUESTIONS, STORIES
from mycli.runtime.diagnostics.selftest import versions
from mycli.runtime.diagnostics.throughput import Trial, run_trial
from mycli.runtime.engine.replies.completion import Completion
from mycli.runtime.errors import ModelError
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.utils.files import disk_errors, write_atomic
from mycli.runtime.utils.json_fields import read_object

if TYPE_CHECKING:  # `open` stands above this room: the caller opens the model
    from mycli.runtime.engine.replies.opened_model import OpenedModel

SECONDS = 20.0  # of measuring, half for prompts and half for replies
SAMPLE_SECONDS = 0.5
FEWEST_SAMPLES = 5
TIMED_TOKENS = 256
REPLY_TOKENS = 48
TOP = 5  # likeliest tokens at each position whose log-probabilities are compared
PROMPTS = (*QUESTIONS[:3], *STORIES[:1])
# A change counts if its whole interval is beyond this: two sessions on one machine differ by about 5 % for no reason
# that an update has to do with (clocks, placement of pages, neighbours).
MARGIN = 0.08
BUSY = 0.2
# A product of torch is timed before and after: if it became slower too, the machine did, not mycli. A sample takes
# milliseconds.
REFERENCE_SIZE = {"cpu": 512, "cuda": 4096}
REFERENCE_SAMPLES = 25
_RESAMPLES = 1000
_VERSION = 1

Verdict = Literal["faster", "slower", "no change"]


@dataclass(frozen=True)
class GoldenRecord:
    """The replies of a model and their speed. `files`: digest of the model's file names and sizes.

    `lengths`: tokens of a prompt and of a reply whose speed was measured; `rates`: tokens per second by these names;
    `compared`, `reminded`: the versions that it was compared with, and those that mentioned it.
    """

    device: str
    dtype: str
    versions: Mapping[str, str]
    files: str
    tokens: tuple[tuple[int, ...], ...]
    logprobs: str  # digest of all bits
    lengths: Mapping[str, int]
    rates: Mapping[str, tuple[float, ...]]
    compared: tuple[str, ...] = ()
    reminded: tuple[str, ...] = ()
    busy: float = 0.0  # seconds per second in which threads of the measurement waited for a core
    reference: tuple[float, ...] = ()  # products per second (REFERENCE_SIZE)

    def is_new(self, version: str) -> bool:
        """Return whether `version` (`current_version`) neither made this record nor was compared with it."""
        return version not in (version_line(self.versions), *self.compared)

    def with_compared(self, version: str) -> "GoldenRecord":
        return replace(self, compared=(*self.compared, version))

    def with_reminded(self, version: str) -> "GoldenRecord":
        return replace(self, reminded=(*self.reminded, version))

    def write(self, path: Path) -> None:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            text = json.dumps({"format_version": _VERSION, **asdict(self)}) + "\n"
            write_atomic(path, text.encode(), private=True)

    @classmethod
    def read(cls, path: Path) -> "GoldenRecord | None":
        """Read a record; None if there is none that can be read, as after a change of its format."""
        try:
            fields = read_object(path)
            if fields.integer("format_version") != _VERSION:
                return None
            lengths, rates = fields.object("lengths"), fields.object("rates")
            return cls(
                device=fields.text("device"),
                dtype=fields.text("dtype"),
                versions={name: str(value) for name, value in fields.object("versions").values.items()},
                files=fields.text("files"),
                tokens=tuple(tuple(map(int, reply)) for reply in fields.array("tokens", list)),
                logprobs=fields.text("logprobs"),
                lengths={name: lengths.integer(name, low=1) for name in lengths.values},
                rates={name: tuple(rates.array(name, float)) for name in rates.values},
                compared=tuple(fields.array("compared", str)),
                reminded=tuple(fields.array("reminded", str)),
                busy=fields.number("busy", 0.0),
                reference=tuple(fields.array("reference", float)),
            )
        except (ModelError, ValueError):
            return None


def version_line(installed: Mapping[str, str]) -> str:
    """The versions that decide about speed and bits, in one line."""
    return ", ".join(f"{name} {installed[name]}" for name in ("mycli-llm", "torch", "triton") if name in installed)


def current_version() -> str:
    return version_line(versions())


def files_digest(folder: ModelFolder) -> str:
    sizes = sorted((path.name, path.stat().st_size) for path in folder.source_files())
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()


def record(
    opened: "OpenedModel",
    folder: ModelFolder,
    lengths: Mapping[str, int] | None = None,
    *,
    seconds: float = SECONDS,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> GoldenRecord:
    """Reply to fixed prompts and measure for about `seconds`; `lengths` are those of the record to compare with."""
    replies = []
    for number, prompt in enumerate(PROMPTS):
        progress("replies", number, len(PROMPTS))
        # Greedy, several tokens in one call where a pass can do that; then with the logits of each token.
        fast = opened.generate(prompt, params=SamplingParams(), max_tokens=REPLY_TOKENS)
        replies.append((fast, opened.generate(prompt, params=SamplingParams(), max_tokens=REPLY_TOKENS, logprobs=TOP)))
    trials = _trials(opened, lengths, seconds)
    device = opened.placement.device
    _reference_rates(device)  # the first products are slower
    reference = _reference_rates(device)
    rates, waited, began = {}, cpu_wait_seconds() or 0.0, time.monotonic()
    for name, (trial, repetitions) in trials.items():
        progress(f"speed of {name}", 0, repetitions)
        result = run_trial(opened.model.runner, trial, repetitions, progress=_counted(progress, name, repetitions))
        rates[name] = result.rates
    return GoldenRecord(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        dtype=opened.placement.dtype_name,
        versions=versions(),
        files=files_digest(folder),
        tokens=tuple(tuple(fast.tokens) for fast, _ in replies),
        logprobs=_digest([reply for _, reply in replies]),
        lengths={name: trial.prompt or trial.generate for name, (trial, _) in trials.items()},
        rates=rates,
        busy=((cpu_wait_seconds() or 0.0) - waited) / (time.monotonic() - began),
        reference=(*reference, *_reference_rates(device)),
    )


def _reference_rates(device: torch.device) -> tuple[float, ...]:
    size, rates = REFERENCE_SIZE[device.type], []
    left, right = torch.ones(size, size, device=device), torch.ones(size, size, device=device)
    for _ in range(REFERENCE_SAMPLES):
        began = time.perf_counter()
        (left @ right)[0, 0].item()  # waits for a GPU
        rates.append(1 / (time.perf_counter() - began))
    return tuple(rates)


def _counted(progress: Callable[[str, int, int], None], name: str, total: int) -> Callable[[int], None]:
    return lambda repetition: progress(f"speed of {name}", repetition, total)


def _trials(opened: "OpenedModel", lengths: Mapping[str, int] | None, seconds: float) -> dict[str, tuple[Trial, int]]:
    runner, longest = opened.model.runner, opened.model.runner.config.max_context - 2
    prompt = (lengths or {}).get("prompt", min(TIMED_TOKENS, longest))
    (short,) = run_trial(runner, Trial(0, min(16, longest)), 1).rates
    reply = (lengths or {}).get("reply", max(8, min(int(short * SAMPLE_SECONDS), longest)))
    trials = {"prompt": Trial(prompt, 0), "reply": Trial(0, reply)}

    def repetitions(trial: Trial) -> int:
        rate = max(run_trial(runner, trial, 2).rates)  # one sample alone may have been disturbed
        return max(FEWEST_SAMPLES, min(100, int(seconds / 2 * rate / (trial.prompt or trial.generate))))

    return {name: (trial, repetitions(trial)) for name, trial in trials.items()}


def _digest(replies: Sequence[Completion]) -> str:
    digest = hashlib.sha256()
    for reply in replies:
        for position in reply.logprobs:
            digest.update(struct.pack("<qd", position.token, position.logprob))
            for token, logprob in position.top:
                digest.update(struct.pack("<qd", token, logprob))
    return digest.hexdigest()


@dataclass(frozen=True)
class SpeedChange:
    """The relative change of the `undisturbed` rate with its 95 % interval; -0.2 is 20 % slower."""

    before: float
    after: float
    low: float
    high: float

    @property
    def relative(self) -> float:
        return self.after / self.before - 1

    @property
    def verdict(self) -> Verdict:
        return "slower" if self.high < -MARGIN else "faster" if self.low > MARGIN else "no change"


def undisturbed(rates: Sequence[float]) -> float:
    """The upper quartile: other programs only make samples slower, and seldom more than half."""
    return sorted(rates)[round(0.75 * (len(rates) - 1))]


def speed_change(before: Sequence[float], after: Sequence[float]) -> SpeedChange:
    # The interval: percentiles of the ratio of resampled rates (bootstrap). It assumes no distribution, and rates have
    # none that is known: they are bounded above and have a tail below.
    source = random.Random(0)

    def resampled(rates: Sequence[float]) -> float:
        return undisturbed(source.choices(rates, k=len(rates)))

    ratios = sorted(resampled(after) / resampled(before) for _ in range(_RESAMPLES))
    tail = round(0.025 * _RESAMPLES)
    return SpeedChange(undisturbed(before), undisturbed(after), ratios[tail] - 1, ratios[-tail - 1] - 1)


@dataclass(frozen=True)
class GoldenComparison:
    """`divergence`: (prompt, token) of the first reply that differs, counted from 0; None if all tokens are equal.

    `busy`: other programs took so much CPU time from one of the measurements that speeds cannot be compared.
    `machine`: the change of the reference product; None if a record has none.
    """

    speed: Mapping[str, SpeedChange]
    divergence: tuple[int, int] | None
    same_bits: bool
    busy: bool
    machine: SpeedChange | None = None

    @property
    def unclear(self) -> bool:
        """Return whether the machine was disturbed, or became faster or slower itself."""
        return self.busy or (self.machine is not None and self.machine.verdict != "no change")

    @property
    def slower(self) -> list[str]:
        return [name for name, change in self.speed.items() if change.verdict == "slower" and not self.unclear]


def compare_records(before: GoldenRecord, after: GoldenRecord) -> GoldenComparison:
    speed = {name: speed_change(rates, after.rates[name]) for name, rates in before.rates.items()}
    pairs = enumerate(zip(before.tokens, after.tokens, strict=True))
    divergence = next(((number, _first_difference(*pair)) for number, pair in pairs if pair[0] != pair[1]), None)
    busy = max(before.busy, after.busy) > BUSY
    machine = speed_change(before.reference, after.reference) if before.reference and after.reference else None
    return GoldenComparison(speed, divergence, divergence is None and before.logprobs == after.logprobs, busy, machine)


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    return next(index for index, pair in enumerate(zip_longest(first, second)) if pair[0] != pair[1])
