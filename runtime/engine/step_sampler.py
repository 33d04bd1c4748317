"""The next tokens of scheduled sequences: sampled from logits on the host, or ahead by a pass itself."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes.base import TokenSteps
from mycli.runtime.engine.request_state import RequestState
from mycli.runtime.engine.scheduled import ScheduledSequence
from mycli.runtime.engine.scheduler import Scheduler
from mycli.runtime.errors import UserError
from mycli.runtime.layers.transformer import HiddenStateHook
from mycli.runtime.sampling.sampler import DeviceSampling, sample_rows

if TYPE_CHECKING:  # what most replies do without
    from mycli.runtime.engine.speculation import Speculator
    from mycli.runtime.sampling.logprobs import TokenLogprob


class StepSampler:
    """Computes logits, those of drafts included, and samples from them; `states`: of requests, by sequence."""

    def __init__(
        self,
        runner: ModelRunner,
        cache: KVCache,
        states: Mapping[int, RequestState],
        speculator: "Speculator | None",
    ) -> None:
        self.runner, self.cache, self.speculator = runner, cache, speculator
        self._states = states

    def propose(self, scheduled: Sequence[ScheduledSequence]) -> dict[int, list[int]]:
        """Return the drafted tokens of each sequence that has room for some."""
        if self.speculator is None:
            return {}
        from mycli.runtime.engine.speculation import DraftRequest

        requests = [
            DraftRequest(part.sequence.id, part.sequence.tokens, part.drafts, self._states[part.sequence.id].sampler)
            for part in scheduled
            if part.drafts
        ]
        proposals = self.speculator.propose(requests) if requests else []
        return {request.sequence: tokens for request, tokens in zip(requests, proposals, strict=True)}

    def compute(self, scheduled: Sequence[ScheduledSequence], chunks: Sequence[Chunk]) -> Tensor:
        """Run a pass over `chunks` and return its logits; keep the hidden states that requests ask for."""
        parts, hook = list(zip(scheduled, chunks, strict=True)), None
        if self.speculator is not None:
            from mycli.runtime.engine.speculation import ComputedTokens

            hook = self.speculator.hidden_state_hook(
                ComputedTokens(part.sequence.id, chunk.start, chunk.count, part.sequence.tokens)
                for part, chunk in parts
            )
        if all(part.sequence.request.hidden_states is None for part in scheduled):
            return self.runner.run(chunks, self.cache, hook)
        states: list[Tensor] = []
        logits = self.runner.run(chunks, self.cache, _tee(hook, states.append))
        hidden, end = torch.cat(states, dim=-2).flatten(0, -2), 0
        for part, chunk in parts:
            start, end = end, end + chunk.count
            self._states[part.sequence.id].keep_hidden(part, hidden[start:end])
        return logits

    def read(
        self, scheduled: Sequence[ScheduledSequence], chunks: Sequence[Chunk], logits: Tensor
    ) -> tuple[dict[int, "tuple[TokenLogprob, ...]"], list[tuple[ScheduledSequence, range]]]:
        """Store the logits of scored tokens; return the logprobs of prompts, and the rows to sample from."""
        prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        rows_to_sample, end = list[tuple[ScheduledSequence, range]](), 0
        for part, chunk in zip(scheduled, chunks, strict=True):
            rows, end = range(end, end + chunk.logits), end + chunk.logits
            sequence, state = part.sequence, self._states[part.sequence.id]
            if part.scored:
                prompt_logprobs[sequence.id] = state.score(part, logits[rows.start : end])
                rows = rows[-1:]
            if not rows or not part.completes:
                continue
            if sequence.request.scored_tokens:
                state.choice_logits = logits[rows[-1], list(sequence.request.scored_tokens)].clone()
            if sequence.limit:
                rows_to_sample.append((part, rows))
        return prompt_logprobs, rows_to_sample

    def sample(
        self, samples: Sequence[tuple[ScheduledSequence, range]], drafted: dict[int, list[int]], logits: Tensor
    ) -> dict[int, list[int] | UserError]:
        """Return the next tokens of each sequence from its rows of `logits`, or the error that ends it."""
        sampled: dict[int, list[int] | UserError] = {}
        numbers, places = list[int](), list[int]()
        for part, rows in samples:
            number = part.sequence.id
            if not drafted.get(number):
                numbers.append(number)
                places.append(rows.start)
                continue
            assert self.speculator is not None
            try:
                rows_logits, sampler = logits[rows.start : rows.stop], self._states[number].sampler
                sampled[number] = self.speculator.verify(number, rows_logits, sampler)
            except UserError as error:
                sampled[number] = error
        if numbers:
            chosen = logits if places == list(range(len(logits))) else logits[places]
            tokens = sample_rows(chosen, [self._states[number].sampler for number in numbers])
            for number, token in zip(numbers, tokens, strict=True):
                sampled[number] = token if isinstance(token, UserError) else [token]
        return sampled


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
        stop_ids = [part.sequence.request.stop_ids for part in scheduled]
        chunks = [part.chunk([]) for part in scheduled]
        return self._runner.tokens(chunks, sampling, self._cache, count, stop_ids)


def _tee(first: HiddenStateHook | None, second: HiddenStateHook) -> HiddenStateHook:
    def both(hidden: Tensor) -> None:
        if first is not None:
            first(hidden)
        second(hidden)

    return both
