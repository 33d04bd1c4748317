"""Is speculation worth it? The same prompts with and without, and the textbook's numbers from the loop's own judge.

Knows sessions, drafters and clocks. Does not print, and does not know where prompts come from.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mycli.runtime.engine.generate import Session
from mycli.runtime.engine.stats import SpeculationStats
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.sampling.sampler import Sampler, Sampling
from mycli.runtime.speculative.decode import SpeculativeSession, judge
from mycli.runtime.speculative.draft_length import (
    AdaptiveDraftLength,
    DraftLengthPolicy,
    FixedDraftLength,
    expected_tokens,
)
from mycli.runtime.speculative.proposers import Drafter, Proposal

TEXTBOOK = ((0.7, 4), (0.7, 8), (0.8, 4), (0.8, 8), (0.9, 4), (0.9, 8))  # acceptance, tokens drafted
SIMULATED_PASSES = 1500


@dataclass(frozen=True)
class Subject:
    """What is tried: a model and what drafts for it, with room for `capacity` tokens."""

    model: Transformer
    new_drafter: Callable[[], Drafter]
    vocabulary_size: int
    stop: frozenset[int]
    capacity: int

    def session(self, pace: Callable[[Drafter], DraftLengthPolicy]) -> SpeculativeSession:
        """A new one, with empty caches, warmed up."""
        drafter = self.new_drafter()
        session = SpeculativeSession(self.model, self.capacity, drafter, pace(drafter))
        session.warm_up()
        return session

    def reply(self, session: Session, prompt: Sequence[int], limit: int) -> list[int]:
        """The greedy tokens."""
        sampler = Sampler(Sampling(), self.vocabulary_size, self.model.device)
        limit = min(limit, session.capacity - len(prompt) + 1)
        return [tokens[0] for tokens in session.generate(prompt, sampler, limit, self.stop)]


@dataclass(frozen=True)
class Comparison:
    """One kind of text. `plain`, `drafted`: tokens per second of decoding; `lengths`: records of fixed lengths."""

    plain: float
    drafted: float
    record: SpeculationStats
    lengths: dict[int, SpeculationStats]
    notes: tuple[str, ...]

    @property
    def speedup(self) -> float:
        """Above 1 where speculation pays."""
        return self.drafted / self.plain


class _Clock:
    """Tokens and seconds of decoding; the first token of a reply belongs to the prefill."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    def add(self, session: Session) -> None:
        self.tokens += len(session.timing.token_seconds) - 1
        self.seconds += sum(session.timing.token_seconds[1:])

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def _total(records: Sequence[SpeculationStats | None]) -> SpeculationStats:
    total = SpeculationStats()
    for record in records:
        if record is not None:
            total.passes += record.passes
            total.drafted += record.drafted
            total.judged += record.judged
            total.kept += record.kept
    return total


def compare(
    subject: Subject, prompts: Sequence[Sequence[int]], limit: int, repetitions: int, lengths: Sequence[int] = (4, 8)
) -> Comparison:
    """Each prompt without and with speculation in turn, so that a busy machine troubles both.

    The pace is the one of `chat`: it measures, and stops where it does not pay. Then once with each of `lengths`.
    """
    notes: list[str] = []
    plain = Session(subject.model, subject.capacity)
    drafted = subject.session(lambda drafter: AdaptiveDraftLength(drafter.weight, notes.append))
    subject.reply(plain, prompts[0], 4)
    clocks = {False: _Clock(), True: _Clock()}
    records = []
    for _ in range(repetitions):
        for prompt in prompts:
            for session in (plain, drafted):
                session.forget()
                subject.reply(session, prompt, limit)
                clocks[session is drafted].add(session)
            records.append(drafted.timing.record)
    fixed = {}
    for length in lengths:
        session = subject.session(lambda drafter, length=length: FixedDraftLength(length))  # type: ignore[misc]  # a default binds
        found = []
        for prompt in prompts:
            subject.reply(session, prompt, limit)
            found.append(session.timing.record)
        fixed[length] = _total(found)
    return Comparison(clocks[False].rate, clocks[True].rate, _total(records), fixed, tuple(notes))


def textbook() -> Iterator[tuple[float, int, float, float]]:
    """(acceptance, drafted, expected tokens per pass, found) with proposals that the loop's own judge accepts so often.

    The target gives the proposed token the probability `acceptance`, the draft gives it 1.
    """
    sampler = Sampler(Sampling(temperature=1.0, seed=0), 2, torch.device("cpu"))
    for acceptance, drafted in TEXTBOOK:
        logits = torch.tensor([acceptance, 1 - acceptance]).log().expand(drafted + 1, -1)
        proposal = Proposal([0] * drafted, torch.tensor([1.0, 0.0]).expand(drafted, -1))
        made = sum(len(judge(logits, proposal, sampler)) for _ in range(SIMULATED_PASSES))
        yield acceptance, drafted, expected_tokens(acceptance, drafted), made / SIMULATED_PASSES
