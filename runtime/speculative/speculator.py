"""Speculative decoding: adds draft tokens to the passes of the target model, whose output stays the same."""

import time
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.sequence import SequenceOutput
from mycli.runtime.engine.speculation import ComputedTokens, DraftRequest
from mycli.runtime.layers.transformer import HiddenStateHook
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative.draft_length import DraftLengthPolicy
from mycli.runtime.speculative.proposers import NO_PROPOSAL, Proposal, Proposer
from mycli.runtime.speculative.rejection_sampling import rejection_sample, sample_matching

_WARM_UP = -1  # a sequence number that no request has


class ProposerSpeculator:
    """A `Speculator` with one proposer for all sequences of an engine.

    Greedy tokens, and those of a seeded reply, are the same as without it, except where two choices are equal up to the
    rounding of a pass over several tokens. Without a seed, sampled tokens have the same distribution.
    """

    def __init__(
        self, proposer: Proposer, new_policy: Callable[[], DraftLengthPolicy], *, pipelined: bool = True
    ) -> None:
        """new_policy: creates the policy for a load (number of decoding sequences) that was not met before.

        pipelined: passes that sample tokens begin the next ones before these are read, so a draft discards work.
        """
        self.proposer, self._pipelined = proposer, pipelined
        self._new_policy = new_policy
        # By the power of two of the number of decoding sequences: a pass over many is expensive already, and drafts
        # must stop where they lose time.
        self._policies: dict[int, DraftLengthPolicy] = {}
        self._policy = self._policies[0] = new_policy()
        # Of the current step: proposals, unread tokens and evidence by sequence, and the seconds of drafting.
        self._proposals: dict[int, Proposal] = {}
        self._lags: dict[int, int] = {}
        self._evidence: dict[int, int] = {}
        self._waits = False  # a sequence has a draft in this step, or may have one in the next
        self._drafting = 0.0

    @property
    def step_seconds(self) -> float | None:
        return self._policy.step_seconds

    @property
    def nbytes(self) -> int:
        return self.proposer.nbytes

    def draft_length(self, sequence: int, tokens: Sequence[int], room: int, decoding: int) -> int:
        load = (decoding - 1).bit_length()
        policy = self._policies.get(load)
        if policy is None:
            policy = self._policies[load] = self._new_policy()
        self._policy = policy
        evidence = self._evidence[sequence] = self.proposer.evidence(sequence, tokens)
        if evidence == NO_PROPOSAL:
            return 0
        lag = self._lags[sequence] = self.proposer.lag(sequence, tokens)
        length = policy.length(room, lag, evidence)
        self._waits = self._waits or bool(length) or not policy.stopped(evidence)
        return length

    @property
    def rests(self) -> bool:
        # Proposers that run passes need the model's hidden states, or fall behind what they have computed.
        if self.proposer.relative_cost:
            return False
        # Without a pipeline every step without a draft may make several tokens. Then the policy compares drafts with
        # the fastest plain steps: a pass for a single token of a small model takes 1.5 times as long as one of a call.
        return not self._pipelined or (not self._waits and self._policy.step_seconds is not None)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        began = time.perf_counter()
        proposals = self.proposer.propose(requests)
        self._proposals = {request.sequence: proposal for request, proposal in zip(requests, proposals, strict=True)}
        self._drafting = time.perf_counter() - began
        return [proposal.tokens for proposal in proposals]

    def hidden_state_hook(self, parts: Iterable[ComputedTokens]) -> HiddenStateHook | None:
        return self.proposer.hidden_state_hook(parts)

    def verify(self, sequence: int, logits: Tensor, sampler: Sampler) -> list[int]:
        """Accept by rejection sampling, or, with a seed, by sampling what would be sampled without drafts."""
        accept = sample_matching if sampler.repeatable else rejection_sample
        return accept(logits, self._proposals[sequence], sampler)

    def observe(self, outputs: Sequence[SequenceOutput], seconds: float) -> None:
        drafted = [output for output in outputs if output.drafted]
        if not drafted:
            self._policy.observe_plain(seconds - self._drafting, wasted=self._drafting)
        for output in drafted:
            lag, evidence = self._lags[output.sequence], self._evidence[output.sequence]
            self._policy.observe_draft(output.drafted, output.accepted, lag, seconds, evidence)
        self._begin_step()

    def observe_plain(self, tokens: int, seconds: float) -> None:
        self._policy.observe_plain(seconds / tokens, tokens=tokens)
        self._begin_step()

    def _begin_step(self) -> None:
        self._drafting, self._waits, self._lags, self._evidence, self._proposals = 0.0, False, {}, {}, {}

    def truncate(self, sequence: int, length: int) -> None:
        self.proposer.truncate(sequence, length)

    def finish(self, sequence: int, tokens: Sequence[int]) -> None:
        self.proposer.finish(sequence, tokens)

    def forget(self) -> None:
        self.proposer.forget()


def warm_up(engine: Engine) -> None:
    """Run two passes with drafts, so that the first reply does not choose kernels. Leaves all caches empty."""
    speculator, context = engine.speculator, engine.context
    if speculator is None or engine.has_work:
        return
    tokens = [0] * min(4, context // 2)
    sampler = Sampler(SamplingParams(), engine.runner.config.vocab_size, engine.runner.device)
    blocks = tuple(range(engine.scheduler.pool.blocks_for(min(4, context))))
    for count in (1, min(4, context - len(tokens))):
        speculator.propose([DraftRequest(_WARM_UP, tokens, count, sampler)])
        engine.runner.run([Chunk([0] * count, 0, blocks, count)], engine.cache)
        speculator.finish(_WARM_UP, [])
    engine.forget()
