"""Speculative decoding: the target model's own output, with drafted tokens added to the passes over its sequences.

When it pays is decided by what passes cost and how many drafts stand, apart for one sequence, two, four and so on: a
pass over many sequences is dear already, and drafts stop where they make it lose. Knows proposers and policies of draft
lengths; does not know text, the target model, or whose turn it is.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.speculation import Drafted, Heard, Listener
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative.draft_length import DraftLengthPolicy
from mycli.runtime.speculative.proposers import Proposal, Proposer
from mycli.runtime.speculative.rejection_sampling import rejection_sample, sample_matching

_WARMED_UP = -1  # the number of no sequence


class ProposerSpeculator:
    """A `Speculator` of one proposer for all sequences of an engine.

    Greedy tokens are the ones without it, and so are those of a seeded reply, except where two choices are equal up to
    the rounding of a pass over several tokens. Without a seed drawn tokens follow the same distribution.
    """

    def __init__(self, proposer: Proposer, new_policy: Callable[[], DraftLengthPolicy]) -> None:
        """`new_policy`: for a number of sequences that was not met before."""
        self.proposer = proposer
        self._new_policy = new_policy
        self._policies: dict[int, DraftLengthPolicy] = {}  # by the power of two that the decoding sequences reach
        self._policy = self._policies[0] = new_policy()
        # Of this step, by sequence: what was proposed, and how many tokens had to be read for it; seconds of drafting.
        self._proposals: dict[int, Proposal] = {}
        self._lags: dict[int, int] = {}
        self._drafting = 0.0

    @property
    def step_seconds(self) -> float | None:
        """Of a plain step with as many sequences as last, None before one was measured."""
        return self._policy.step_seconds

    @property
    def nbytes(self) -> int:
        """The proposer's."""
        return self.proposer.nbytes

    def wanted(self, sequence: int, text: Sequence[int], room: int, decoding: int) -> int:
        """As the policy for so many sequences has it."""
        load = (decoding - 1).bit_length()
        policy = self._policies.get(load)
        if policy is None:
            policy = self._policies[load] = self._new_policy()
        self._policy = policy
        lag = self._lags[sequence] = self.proposer.lag(sequence, text)
        return policy.length(room, lag)

    def propose(self, asked: Sequence[Drafted]) -> list[list[int]]:
        """What the proposer has to say."""
        began = time.perf_counter()
        proposals = self.proposer.propose(asked)
        self._proposals = {one.sequence: proposal for one, proposal in zip(asked, proposals, strict=True)}
        self._drafting = time.perf_counter() - began
        return [proposal.tokens for proposal in proposals]

    def listener(self, heard: Iterable[Heard]) -> Listener | None:
        """The proposer's."""
        return self.proposer.listener(heard)

    def accept(self, sequence: int, logits: Tensor, sampler: Sampler) -> list[int]:
        """By rejection sampling, or, where a seed promises the same tokens every time, by drawing what it draws."""
        judge = sample_matching if sampler.repeatable else rejection_sample
        return judge(logits, self._proposals[sequence], sampler)

    def observe(self, results: Sequence[tuple[int, int, int]], seconds: float) -> None:
        """Tell the policy; every sequence with a draft is a trial of its own at the cost of the whole step."""
        drafted = [result for result in results if result[1]]
        if not drafted:
            self._policy.observe_plain(seconds - self._drafting, wasted=self._drafting)
        for sequence, count, accepted in drafted:
            self._policy.observe_draft(count, accepted, self._lags[sequence], seconds)
        self._drafting, self._lags, self._proposals = 0.0, {}, {}

    def keep(self, sequence: int, length: int) -> None:
        """Roll the proposer back."""
        self.proposer.truncate(sequence, length)

    def end(self, sequence: int, text: Sequence[int]) -> None:
        """Let go of the sequence."""
        self.proposer.end(sequence, text)

    def forget(self) -> None:
        """Of the proposer's texts; what is known of costs stays."""
        self.proposer.forget()


def warm_up(engine: Engine) -> None:
    """Two passes with drafts, so that the first of a reply need not choose kernels. Leaves all caches empty."""
    speculator, context = engine.speculator, engine.context
    if speculator is None or engine.has_work:
        return
    text = [0] * min(4, context // 2)
    sampler = Sampler(SamplingParams(), engine.runner.config.vocab_size, engine.runner.device)
    blocks = tuple(range(engine.scheduler.pool.needed(min(4, context))))
    for count in (1, min(4, context - len(text))):
        speculator.propose([Drafted(_WARMED_UP, text, count, sampler)])
        engine.runner.run([Chunk([0] * count, 0, blocks, count)], engine.cache)
        speculator.end(_WARMED_UP, [])
    engine.forget()
