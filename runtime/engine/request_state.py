"""The sampling state of a request in the engine: sampler, logprobs, and the tokens that a device samples by itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes.base import TokenSteps
from mycli.runtime.engine.scheduled import ScheduledSequence
from mycli.runtime.engine.scheduler import Scheduler
from mycli.runtime.engine.sequence import Request
from mycli.runtime.sampling.sampler import DeviceSampling, RandomNumbers, Sampler

if TYPE_CHECKING:  # few requests ask for logprobs
    from mycli.runtime.engine.beams import BeamGroup
    from mycli.runtime.sampling.logprobs import LogprobRecorder, TokenLogprob


@dataclass
class RequestState:
    """Sampler and logprob recorder of one sequence.

    scored: prompt tokens whose logprobs were returned; beams: the search that the sequence belongs to.
    """

    sampler: Sampler
    recorder: "LogprobRecorder | None"
    device_sampling: DeviceSampling | None
    returned: int = 0  # logprobs
    scored: int = 1
    hidden: list[Tensor] = field(default_factory=list)  # final hidden states of the prompt, if requested
    choice_logits: Tensor | None = None  # of the tokens that the request scores
    beams: "BeamGroup | None" = None

    @classmethod
    def start(
        cls, request: Request, vocab_size: int, device: torch.device, limit: int, clock: Callable[[], float]
    ) -> "RequestState":
        """Create the state of a new sequence of at most `limit` tokens; its deadline is in seconds of `clock`.

        Raises UsageError for a bias of a token that does not exist.
        """
        recorder = constraint = None
        if request.logprobs is not None:
            from mycli.runtime.sampling.logprobs import LogprobRecorder

            recorder = LogprobRecorder(request.logprobs)
        if request.grammar is not None:
            from mycli.runtime.sampling.grammars.state import ReplyLimits

            ends_at = None if request.deadline is None else clock() + request.deadline
            constraint = request.grammar.start(limits=ReplyLimits(limit, ends_at, clock))
        start = request.start
        seed = request.sampling.seed if start is None else start.seed
        numbers = RandomNumbers(seed, 0 if start is None else start.numbers)
        sampler = Sampler(
            request.sampling, vocab_size, device, constraint=constraint, recorder=recorder, numbers=numbers
        )
        sampler.observe_ids(request.prompt)
        if start is not None:
            sampler.resume(start.tokens, start.shortened)
        return cls(sampler, recorder, None if request.beams else sampler.device_sampling())

    def next_logprobs(self, count: int) -> "tuple[TokenLogprob, ...]":
        if self.recorder is None:
            return ()
        self.returned += count
        return tuple(self.recorder.rows[0][self.returned - count : self.returned])

    def keep_hidden(self, part: ScheduledSequence, hidden: Tensor) -> None:
        """Store the requested rows of the hidden states of `part`, [tokens, hidden]."""
        request = part.sequence.request
        if request.hidden_states == "all":
            self.hidden.append(hidden.clone())
        elif request.hidden_states == "last" and part.completes:
            self.hidden.append(hidden[-1:].clone())

    @property
    def all_hidden(self) -> Tensor | None:
        return torch.cat(self.hidden) if self.hidden else None

    def score(self, part: ScheduledSequence, logits: Tensor) -> "tuple[TokenLogprob, ...]":
        """Return the logprobs of the prompt tokens after the rows of `part` that were not returned before."""
        sequence = part.sequence
        first = max(self.scored, part.start + 1)
        end = min(part.start + part.count + 1, sequence.prompt_length)
        if first >= end:
            return ()
        from mycli.runtime.sampling.logprobs import token_logprobs

        self.scored = end
        rows = logits[first - 1 - part.start : end - 1 - part.start, : self.sampler.vocab_size]
        return tuple(token_logprobs(rows, sequence.tokens[first:end], sequence.request.logprobs or 0))


class TokensAhead:
    """Tokens that a pass samples by itself, several at a time, while the same sequences decode from step to step."""

    def __init__(self, runner: ModelRunner, cache: KVCache) -> None:
        self._runner, self._cache = runner, cache
        self._sequences: list[tuple[int, tuple[int, ...]]] = []  # number and blocks
        self._steps: Iterator[TokenSteps] | None = None

    def next(
        self, scheduled: Sequence[ScheduledSequence], states: Mapping[int, RequestState], scheduler: Scheduler
    ) -> TokenSteps | None:
        """Return the next tokens of the scheduled sequences; None, as after `drop`, if logits are to be sampled.

        All must decode without drafts, with settings that a pass samples with.
        """
        settings, sequences = [], []
        for part in scheduled:
            sampling = states[part.sequence.id].device_sampling
            plain = part.is_decode and not part.drafts
            if sampling is None or not plain or not (sampling.plain_greedy or self._runner.passes.samples):
                self._steps = None
                return None
            settings.append(sampling)
            sequences.append((part.sequence.id, tuple(part.sequence.table.blocks)))
        steps = next(self._steps, None) if self._steps is not None and sequences == self._sequences else None
        if steps is None:
            # Tokens made ahead for other sequences, or in other blocks, are dropped.
            self._steps = self._start(scheduled, settings, scheduler)
            self._sequences = [(part.sequence.id, tuple(part.sequence.table.blocks)) for part in scheduled]
            steps = None if self._steps is None else next(self._steps, None)
        return steps

    def drop(self) -> None:
        """Drop tokens that were sampled ahead: another pass has continued their sequences."""
        self._steps = None

    def _start(
        self, scheduled: Sequence[ScheduledSequence], sampling: Sequence[DeviceSampling], scheduler: Scheduler
    ) -> Iterator[TokenSteps] | None:
        left = min([part.sequence.limit - part.sequence.sampled for part in scheduled])
        count = scheduler.reserve_ahead(scheduled, left)
        stop_ids = frozenset[int]().union(*[part.sequence.request.stop_ids for part in scheduled])
        chunks = [part.chunk([]) for part in scheduled]
        return self._runner.tokens(chunks, sampling, self._cache, count, stop_ids)
