"""Measures whether speculative decoding pays: the same prompts with and without it, and the textbook's formula."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.replies.completion import generate
from mycli.runtime.engine.sequence import Request, reply_room
from mycli.runtime.engine.stats import SpeculationStats, Timing
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative.draft_length import (
    AdaptiveDraftLength,
    DraftLengthPolicy,
    FixedDraftLength,
    draft_lengths,
    expected_tokens,
)
from mycli.runtime.speculative.proposers import Proposal, Proposer
from mycli.runtime.speculative.rejection_sampling import rejection_sample
from mycli.runtime.speculative.speculator import ProposerSpeculator, warm_up

TEXTBOOK = ((0.7, 3), (0.7, 7), (0.8, 3), (0.8, 7), (0.9, 3), (0.9, 7))  # acceptance rate, draft tokens
SIMULATED_PASSES = 1500


@dataclass(frozen=True)
class SpeculationSubject:
    """A model and a proposer to measure, with a context of `context` tokens."""

    runner: ModelRunner
    new_proposer: Callable[[], Proposer]
    vocabulary_size: int
    stop: frozenset[int]
    context: int

    def lengths(self) -> Sequence[int]:
        """Return the draft lengths among which an engine with this model and proposer chooses."""
        return draft_lengths(self.new_proposer().relative_cost, self._on_gpu)

    @property
    def _on_gpu(self) -> bool:
        return self.runner.device.type == "cuda"

    def engine(self, policy: Callable[[Proposer], DraftLengthPolicy] | None = None) -> Engine:
        """Return a new engine for one sequence; without a policy it does not speculate."""
        speculator = None
        if policy is not None:
            proposer, new_policy = self.new_proposer(), policy
            speculator = ProposerSpeculator(proposer, lambda: new_policy(proposer), pipelined=self._on_gpu)
        engine = Engine(self.runner, CacheShape.contiguous(self.context), self.vocabulary_size, speculator=speculator)
        warm_up(engine)
        return engine

    def reply(self, engine: Engine, prompt: Sequence[int], limit: int) -> tuple[list[int], Timing]:
        """Return the greedy tokens and their timing."""
        limit = min(limit, reply_room(engine.context, len(prompt)))
        return generate(engine, Request(tuple(prompt), limit=limit, stop_ids=self.stop))


@dataclass(frozen=True)
class TokensPerPass:
    """Tokens per pass that verifies `drafted` tokens: `expected` by the formula, and measured (`found`)."""

    drafted: int
    acceptance: float
    expected: float
    found: float


@dataclass(frozen=True)
class SpeculationResult:
    """Results of one kind of text: tokens per second without and with a draft; `lengths`: with fixed draft lengths."""

    plain: float
    drafted: float
    record: SpeculationStats
    lengths: tuple[TokensPerPass, ...]
    notes: tuple[str, ...]

    @property
    def speedup(self) -> float:
        return self.drafted / self.plain


class _Clock:
    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    def add(self, timing: Timing) -> None:
        self.tokens += len(timing.token_seconds) - 1
        self.seconds += sum(timing.token_seconds[1:])

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def _total(records: Iterable[SpeculationStats | None]) -> SpeculationStats:
    total = SpeculationStats()
    for record in filter(None, records):
        total.passes += record.passes
        total.drafted += record.drafted
        total.compared += record.compared
        total.accepted += record.accepted
    return total


def measure_speculation(
    subject: SpeculationSubject,
    prompts: Sequence[Sequence[int]],
    limit: int,
    repetitions: int,
    lengths: Sequence[int] | None = None,
    before_reply: Callable[[], None] = lambda: None,
) -> SpeculationResult:
    """Time each prompt with the adaptive draft length, then with each of `lengths`; None for those that it chooses.

    `before_reply` may raise to end the measurement.
    """
    # Without and with speculation in turn, so that other load on the machine affects both.
    notes: list[str] = []
    # Before the engines exist: the proposer that has its lengths has a cache as large as theirs.
    chosen = subject.lengths()
    plain = subject.engine()
    drafted = subject.engine(lambda proposer: AdaptiveDraftLength(proposer.relative_cost, notes.append, chosen))
    subject.reply(plain, prompts[0], 4)
    clocks = {False: _Clock(), True: _Clock()}
    records = []
    for _ in range(repetitions):
        for prompt in prompts:
            for engine in (plain, drafted):
                before_reply()
                engine.forget()
                _, timing = subject.reply(engine, prompt, limit)
                clocks[engine is drafted].add(timing)
            records.append(timing.record)
    fixed = tuple(result for length in lengths or chosen for result in _fixed_length(subject, prompts, limit, length))
    return SpeculationResult(clocks[False].rate, clocks[True].rate, _total(records), fixed, tuple(notes))


def _fixed_length(
    subject: SpeculationSubject, prompts: Sequence[Sequence[int]], limit: int, length: int
) -> Iterator[TokensPerPass]:
    engine = subject.engine(lambda _: FixedDraftLength(length))
    record = _total(subject.reply(engine, prompt, limit)[1].record for prompt in prompts)
    if record.passes:  # none if prompt lookup found nothing
        mean = record.drafted / record.passes  # drafts are shorter near the end of a reply
        below, above = (expected_tokens(record.acceptance_rate, int(mean) + more) for more in (0, 1))
        expected = below + (above - below) * (mean - int(mean))
        yield TokensPerPass(length, record.acceptance_rate, expected, record.mean_length)


def textbook() -> Iterator[TokensPerPass]:
    """Simulate drafts with a fixed acceptance rate through the engine's own rejection sampling."""
    # The target gives the proposed token the probability `acceptance`, the draft gives it 1.
    sampler = Sampler(SamplingParams(temperature=1.0, seed=0), 2, torch.device("cpu"))
    for acceptance, drafted in TEXTBOOK:
        logits = torch.tensor([acceptance, 1 - acceptance]).log().expand(drafted + 1, -1)
        proposal = Proposal([0] * drafted, torch.tensor([1.0, 0.0]).expand(drafted, -1))
        tokens = sum(len(rejection_sample(logits, proposal, sampler)) for _ in range(SIMULATED_PASSES))
        yield TokensPerPass(drafted, acceptance, expected_tokens(acceptance, drafted), tokens / SIMULATED_PASSES)
