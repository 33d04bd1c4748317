"""Speculative decoding: the target model's own output, with one pass over several drafted tokens at a time.

Knows proposers, policies of draft lengths and clocks; does not know text or whom it writes for.
"""

import time
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from mycli.runtime.engine.generate import Session
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.stats import SpeculationStats
from mycli.runtime.layers.batch import Batch
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative.draft_length import DraftLengthPolicy
from mycli.runtime.speculative.proposers import Proposer
from mycli.runtime.speculative.rejection_sampling import rejection_sample


class SpeculativeSession(Session):
    """A `Session` of one sequence that makes the same tokens with fewer passes.

    Greedy tokens are the same except where two logits are equal up to the rounding of a pass over several tokens; drawn
    tokens follow the same distribution, but a seed gives other ones, as it does not know which drafts will pay.
    """

    def __init__(self, runner: ModelRunner, context: int, proposer: Proposer, policy: DraftLengthPolicy) -> None:
        super().__init__(runner, context)
        self.proposer = proposer
        self.policy = policy
        self._last = torch.zeros(1, 1, dtype=torch.int64, device=runner.device)  # drawn, not yet in the cache

    @property
    def nbytes(self) -> int:
        """With the proposer's."""
        return super().nbytes + self.proposer.nbytes

    def warm_up(self) -> None:
        """Two passes with drafts, so that the first of a reply need not choose kernels. Leaves both caches empty."""
        text = [0] * min(4, self.context // 2)
        sampler = Sampler(SamplingParams(), self.runner.config.vocab_size, self.device)
        for count in (1, min(4, self.context - len(text))):
            self.proposer.propose(text, count, sampler)
            self._verify([0] * count)
            self.forget()
            self.proposer.truncate(0)

    def generate(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        limit: int,
        stop: frozenset[int] = frozenset(),
    ) -> Generator[list[int], None, None]:
        """As `Session.generate`. The tokens of a pass share its time equally in `timing`."""
        began = time.perf_counter()
        self.stopped = False
        logits = self.prefill(prompt)
        record = self.timing.record = SpeculationStats()
        sampler.observe(torch.tensor([prompt], device=self.device))
        self.proposer.begin(prompt)
        if limit < 1:
            return
        text = list(prompt)
        try:
            self._last = sampler.sample(logits)
            tokens = [int(self._last)]
            while True:
                ended = 1
                while ended < len(tokens) and tokens[ended - 1] not in stop:
                    ended += 1
                seconds = (time.perf_counter() - began) / ended
                for token in tokens[:ended]:
                    self.timing.token_seconds.append(seconds)
                    if token in stop:
                        self.stopped = True
                        return
                    text.append(token)
                    yield [token]
                left = min(limit - len(text) + len(prompt), self.context - len(text) + 1)
                if left < 1:
                    return
                began = time.perf_counter()
                tokens = self._step(text, sampler, left - 1, record)
        finally:
            # As without speculation: the last token drawn is not in the cache.
            record.step_seconds = self.policy.step_seconds
            valid = len(text) - (0 if self.stopped else 1)
            self._keep(min(self.cache.length, valid))
            self.proposer.truncate(valid)

    def _step(self, text: Sequence[int], sampler: Sampler, room: int, record: SpeculationStats) -> list[int]:
        """The next tokens, at least one and at most `room` + 1. The cache then holds all but the last of them."""
        lag = self.proposer.lag(len(text))
        wanted = self.policy.length(room, lag) if room > 0 and not sampler.constrained else 0
        began = time.perf_counter()
        proposal = self.proposer.propose(text, wanted, sampler) if wanted else None
        drafted = time.perf_counter()
        if proposal is None or not proposal.tokens:
            self._last = sampler.sample(self._forward(self._last, logits=True))
            tokens = [int(self._last)]
            self.policy.observe_plain(time.perf_counter() - drafted, wasted=drafted - began)
            return tokens
        tokens = rejection_sample(self._verify([text[-1], *proposal.tokens]), proposal, sampler)
        count, accepted = len(proposal.tokens), len(tokens) - 1
        self._keep(len(text) + accepted)
        self.proposer.truncate(len(text) + accepted)
        self.policy.observe_draft(count, accepted, lag, time.perf_counter() - began)
        record.add(count, accepted)
        self._last = torch.tensor([tokens[-1:]], device=self.device)
        return tokens

    def _verify(self, tokens: list[int]) -> Tensor:
        """Logits fp32 [tokens, vocab] after each of the tokens, which come into the cache."""
        batch = Batch(torch.tensor([tokens], device=self.device), self.cache.length, "all")
        logits = self.runner.run(batch, self.cache)
        self._tokens += tokens
        assert isinstance(logits, Tensor)
        return logits[0]
