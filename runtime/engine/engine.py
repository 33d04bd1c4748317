"""Runs many sequences on one model and one KV cache: schedule, run a pass, sample, until every request is answered.

A reply is `submit` and then `step` until it ends; several replies to one prompt are branches of one sequence. Every
sequence has its own random numbers, so a seeded reply is the same alone or among others. One thread calls everything.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.prefix_index import PrefixIndex
from mycli.runtime.cache.state_pool import StatePool
from mycli.runtime.cache.window_pool import WindowPool
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.request_state import RequestState
from mycli.runtime.engine.scheduled import ScheduledSequence
from mycli.runtime.engine.scheduler import Limits, Scheduler
from mycli.runtime.engine.sequence import BeamOptions, FinishReason, Request, RequestSequence, SequenceOutput
from mycli.runtime.engine.stats import EngineStats
from mycli.runtime.engine.step_sampler import StepSampler, TokensAhead
from mycli.runtime.errors import UserError
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.memory.estimate import state_slots
from mycli.runtime.memory.plan import prefill_chunk
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.sampling.sampler import leading, not_finite

if TYPE_CHECKING:  # what most replies do without
    from mycli.runtime.cache.prefix_store import PrefixStore
    from mycli.runtime.engine.beams import BeamGroup
    from mycli.runtime.engine.disk_prefix_cache import DiskPrefixCache
    from mycli.runtime.engine.replies.whole_texts import WholeTexts
    from mycli.runtime.engine.speculation import Speculator
    from mycli.runtime.sampling.logprobs import TokenLogprob

_NORMAL_ENDS = ("stop", "length", "context")  # after a pass that succeeded


class Engine:
    def __init__(
        self,
        runner: ModelRunner,
        shape: CacheShape,
        vocab_size: int,
        *,
        running: int | None = None,
        chunk: int | None = None,
        speculator: "Speculator | None" = None,
        store: "PrefixStore | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """vocab_size: ids that may be sampled; running: sequences at the same time, None for one for each block; chunk:
        prompt tokens in a pass; store: the disk prefix cache, whose files have every position of every layer. Raises
        ValueError with a store for a shape in which layers with a window have not.
        """
        if store is not None and shape.window_blocks:
            raise ValueError("the disk prefix cache needs every position of layers with a window")
        self.runner, self.shape, self.speculator = runner, shape, speculator
        running = running or shape.blocks
        slots = state_slots(runner.config, running)
        self.cache = runner.make_cache(shape, slots)
        runner.rope(shape.context)  # built now, not during the first reply
        self.vocab_size, self._clock = vocab_size, clock
        states = StatePool(slots) if runner.config.has_recurrent else None
        pool = BlockPool(shape.blocks, PrefixIndex(shape.block_size, states, _windows(runner.config, shape)))
        chunk = chunk or prefill_chunk(runner.device.type == "cuda")
        self._prefixes = None if store is None else self._disk_prefixes(store)
        self.scheduler = Scheduler(pool, Limits(shape.context, chunk, running), clock, self._prefixes)
        self.step_seconds = 0.0  # of the last step: device time, if it worked ahead
        self._states: dict[int, RequestState] = {}
        self._ahead = TokensAhead(runner, self.cache)
        self._sampler = StepSampler(runner, self.cache, self._states, speculator)
        self._finished: list[SequenceOutput] = []  # cancelled since the last step
        self._cache_valid = True  # no pass was interrupted
        self._texts = self._whole_texts(chunk) if runner.config.bidirectional else None

    def _disk_prefixes(self, store: "PrefixStore") -> "DiskPrefixCache":
        from mycli.runtime.engine.disk_prefix_cache import DiskPrefixCache

        return DiskPrefixCache(store, self.cache, self._copy_blocks)

    def _whole_texts(self, chunk: int) -> "WholeTexts":
        from mycli.runtime.engine.replies.whole_texts import WholeTexts

        return WholeTexts(self.runner, chunk, self.shape.context)

    @property
    def context(self) -> int:
        return self.shape.context

    @property
    def nbytes(self) -> int:
        """Bytes of weights and caches."""
        return self.runner.nbytes + self.cache.nbytes + (0 if self.speculator is None else self.speculator.nbytes)

    @property
    def tokens_read(self) -> tuple[int, int]:
        """Tokens of the longest running sequence in the cache, and the number found there: the progress of a prompt."""
        running = self.scheduler.running
        return max(((sequence.table.length, sequence.cached) for sequence in running), default=(0, 0))

    @property
    def shares_cores(self) -> bool:
        return self.runner.device.type == "cpu"

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._finished) or bool(self._texts and self._texts.waiting)

    @property
    def stats(self) -> EngineStats:
        counts, pool = self.scheduler.counts, self.scheduler.pool
        running, waiting = self.scheduler.running, self.scheduler.waiting
        branches = sum(len(sequence.branches) for sequence in (*running, *waiting))
        return EngineStats(
            running=len(running),
            waiting=len(waiting) + branches + (0 if self._texts is None else self._texts.waiting),
            preemptions=counts.preemptions,
            cache_used=pool.used,
            cache_blocks=pool.blocks,
            prefix_queries=counts.queries,
            prefix_hits=counts.hits,
            misses=dict(counts.misses),
            disk=None if self._prefixes is None else self._prefixes.stats,
            activations=self.runner.activations,
        )

    def submit(self, request: Request) -> int:
        """Queue a request and return the number of its sequence.

        Raises UsageError for an empty prompt, a request that can never fit, or a bias of a token that does not exist.
        """
        return self.submit_replies(request, 1)[0]

    def _submit(self, request: Request) -> int:
        if self._texts is not None:
            return self._texts.submit(request)
        state = self._start(request)
        number = self.scheduler.submit(request).id
        self._states[number] = state
        return number

    def submit_replies(self, request: Request, count: int) -> list[int]:
        """Queue `count` replies to one prompt, with consecutive seeds; return the numbers of their sequences.

        The prompt is computed once, unless each reply returns the logprobs of the prompt. Raises as `submit`.
        """
        if request.prompt_logprobs or self._texts is not None:
            return [self._submit(request.for_reply(index)) for index in range(count)]
        if request.beams is not None:
            return self._submit_beams(request, request.beams, count)
        first = self._submit(request)
        return [first, *self.branch(first, count - 1)]

    def _submit_beams(self, request: Request, beams: BeamOptions, count: int) -> list[int]:
        from mycli.runtime.engine.beams import BeamGroup, beam_room, check_beams

        pool, running = self.scheduler.pool, self.scheduler.limits.running
        room = beam_room(request, beams, pool.blocks, pool.block_size)
        check_beams(beams, count, running, self.vocab_size, len(request.stop_ids))
        first = self._submit(request)
        numbers = [first, *self.branch(first, beams.width - 1)]
        members = [member for number in numbers if (member := self.scheduler.get(number)) is not None]
        group = BeamGroup.start(request, beams, members, count, room)
        for number in numbers:
            self._states[number].beams = group
        return numbers[:count]

    def branch(self, sequence: int, count: int) -> list[int]:
        """Add `count` replies to the prompt of a sequence that has not sampled yet; return their numbers.

        Their seeds follow that of the sequence. Raises ValueError for a sequence that has sampled or ended.
        """
        parent = self.scheduler.get(sequence)
        if parent is None:
            raise ValueError(f"sequence {sequence} has ended")
        numbers = []
        for index in range(1, count + 1):
            request = replace(parent.request.for_reply(index), prompt_logprobs=False)
            state = self._start(request)
            numbers.append(self.scheduler.branch(parent, request).id)
            self._states[numbers[-1]] = state
        return numbers

    def _start(self, request: Request) -> RequestState:
        limit = self.scheduler.reply_limit(request)
        return RequestState.start(request, self.vocab_size, self.runner.device, limit, self._clock)

    def cancel(self, sequence: int) -> None:
        """End a sequence and free its blocks now; the next step returns its output. Does nothing if it ended."""
        if self._texts is not None:
            cancelled = self._texts.cancel(sequence)
            self._finished += [] if cancelled is None else [cancelled]
            return
        running = self.scheduler.get(sequence)
        if running is not None:
            self._finished += self._finish_all(running, "cancelled")

    def forget(self) -> None:
        """Drop all cached prefixes, as if the cache were new."""
        self.scheduler.pool.clear()
        self._cache_valid = True
        if self.speculator is not None:
            self.speculator.forget()

    def close(self) -> None:
        if self._prefixes is not None:
            self._prefixes.close()

    def _copy_blocks(self) -> None:
        """Perform the block and state copies queued since the last pass."""
        pool = self.scheduler.pool
        for source, target in pool.take_copies():
            self.cache.copy(source, target)
        for source, target in () if pool.windows is None else pool.windows.take_copies():
            self.cache.copy(source, target, windowed=True)
        for source, target in () if pool.states is None else pool.states.take_copies():
            self.cache.states.copy(source, target)

    def step(self) -> list[SequenceOutput]:
        """Run one pass; return what it produced for its sequences, and the sequences that ended since the last step."""
        began = time.perf_counter()
        outputs, self._finished = self._finished, []
        if self._texts is not None:
            outputs += self._texts.step() if self._texts.waiting else []
            self.step_seconds = time.perf_counter() - began
            return outputs
        outputs += self._end_late()
        scheduled = self.scheduler.schedule(None if self.speculator is None else self._draft_budget)
        self._copy_blocks()
        self.step_seconds = 0.0
        if scheduled:
            # An exception in the pass leaves the cache undefined; `_finish` then stores nothing on disk.
            self._cache_valid = False
            ahead = None
            # A speculator compares the time of plain passes with that of drafts, and may need their hidden states.
            if self.runner.passes.makes_tokens and (self.speculator is None or self.speculator.rests):
                ahead = self._ahead.next(scheduled, self._states, self.scheduler)
            else:
                self._ahead.drop()
            if ahead is None:
                outputs += self._run_pass(scheduled, began)
            else:
                outputs += self._advance_ahead(scheduled, *ahead)
                if self.speculator is not None:
                    self.speculator.observe_plain(len(ahead[0]), time.perf_counter() - began)
            self._cache_valid = True
        self.step_seconds = max(self.step_seconds, time.perf_counter() - began)
        return outputs

    def _end_late(self) -> list[SequenceOutput]:
        """End sequences that wait past their deadline; replies that were preempted keep the tokens they have."""
        outputs = list[SequenceOutput]()
        # One at a time: the branches of a sequence are queued, and so can be late, when it has ended.
        while late := next(filter(self._may_end, self.scheduler.late()), None):
            outputs += self._finish_all(late, "length" if late.has_begun else "deadline")
        return outputs

    def _may_end(self, sequence: RequestSequence) -> bool:
        # A format is completed first, and a search ends with the next tokens of all its beams.
        state = self._states[sequence.id]
        if state.beams is not None:
            return not state.beams.begun
        return not sequence.has_begun or state.sampler.may_be_cut

    def _draft_budget(self, sequence: RequestSequence, room: int) -> int:
        state = self._states[sequence.id]
        if self.speculator is None or state.sampler.constrained or state.beams is not None:
            return 0
        decoding = sum(running.is_decoding for running in self.scheduler.running)
        return self.speculator.draft_length(sequence.id, sequence.tokens, room, decoding)

    def _run_pass(self, scheduled: Sequence[ScheduledSequence], began: float) -> list[SequenceOutput]:
        """Run a pass over the scheduled sequences and sample for those that are computed to their end."""
        self.cache.states.discard_drafts()
        drafted = self._sampler.propose(scheduled)
        chunks = [part.chunk(drafted.get(part.sequence.id, [])) for part in scheduled]
        logits = self._sampler.compute(scheduled, chunks)
        prompt_logprobs, rows_to_sample = self._sampler.read(scheduled, chunks, logits)
        samples: list[tuple[ScheduledSequence, range]] = []
        searches: list[tuple[ScheduledSequence, BeamGroup, Tensor]] = []
        branches: list[ScheduledSequence] = []
        for part, rows in rows_to_sample:
            started = self.scheduler.start_branches(part)
            if (group := self._states[part.sequence.id].beams) is not None:
                searches.append((part, group, logits[rows.start : rows.stop, : self.vocab_size]))
                continue
            # Branches sample from the same row, so their replies differ only by their random numbers.
            samples += [(sampling, rows) for sampling in (part, *started)]
            branches += started
        sampled = self._sampler.sample(samples, drafted, logits)
        outputs = []
        for part in (*scheduled, *branches):
            number = part.sequence.id
            drafts = len(drafted.get(number, ()))
            outputs.append(self._advance(part, sampled.get(number, []), prompt_logprobs.get(number, ()), drafts))
        for part, group, rows_logits in searches:
            if part.sequence.late(self._clock):
                group.search.end_early()
            outputs += group.add(part.sequence.id, rows_logits, self._finish)
        if self.speculator is not None and scheduled[0].is_decode:
            self.speculator.observe(outputs, time.perf_counter() - began)
        return outputs

    def _advance(
        self,
        part: ScheduledSequence,
        sampled: list[int] | UserError,
        prompt_logprobs: "tuple[TokenLogprob, ...]" = (),
        drafted: int = 0,
    ) -> SequenceOutput:
        """Append sampled tokens to a sequence and return its output; finish it if it ends."""
        sequence, state = part.sequence, self._states[part.sequence.id]
        if isinstance(sampled, UserError):
            self._commit_states(part, 0)
            return self._finish(sequence, "error", sampled)
        tokens, reason = self.scheduler.advance(part, sampled)
        if reason is None and tokens and sequence.late(self._clock) and state.sampler.may_be_cut:
            reason = "length"
        shortened = state.sampler.shortened
        if reason == "stop" and shortened:
            # The end token is the model's, but the limit chose its place: a client must know that text is missing.
            reason = "length"
        if drafted:
            self._commit_states(part, sequence.table.length - part.start)
        output = SequenceOutput(
            sequence.id,
            tokens,
            state.next_logprobs(len(tokens)),
            prompt_logprobs,
            reason,
            cached_tokens=sequence.cached,
            queued=sequence.queued,
            drafted=drafted,
            accepted=len(sampled) - 1 if drafted else 0,
            hidden=None if reason is None else state.all_hidden,
            scores=None if reason is None else state.choice_logits,
            numbers=state.sampler.numbers.taken,
            shortened=shortened,
            prompt_tokens=min(sequence.table.length, sequence.prompt_length),
        )
        if self.speculator is not None and drafted:
            self.speculator.truncate(sequence.id, sequence.table.length)
        if reason is not None:
            self._finish(sequence, reason)
        return output

    def _finish_all(self, sequence: RequestSequence, reason: FinishReason) -> list[SequenceOutput]:
        """Remove a sequence and all other beams of its search; return the outputs of those that are replies."""
        group = self._states[sequence.id].beams
        return [self._finish(sequence, reason)] if group is None else group.end(self._finish, reason)

    def _commit_states(self, part: ScheduledSequence, count: int) -> None:
        if part.sequence.table.state is not None:
            self.cache.states.commit_drafts(part.sequence.table.state, count)

    def _finish(
        self, sequence: RequestSequence, reason: FinishReason, error: UserError | None = None
    ) -> SequenceOutput:
        """Remove a sequence. Its cache contents are kept for prefix reuse, unless a pass over them failed."""
        if self._prefixes is not None and error is None and (self._cache_valid or reason in _NORMAL_ENDS):
            self._prefixes.store(sequence.tokens, sequence.table)
        self.scheduler.finish(sequence, discard_cache=error is not None)
        del self._states[sequence.id]
        if self.speculator is not None:
            self.speculator.finish(sequence.id, sequence.tokens)
        return SequenceOutput(
            sequence.id,
            finish_reason=reason,
            cached_tokens=sequence.cached,
            queued=sequence.queued,
            error=error,
        )

    def _advance_ahead(
        self, scheduled: Sequence[ScheduledSequence], steps: list[list[int]], seconds: float
    ) -> list[SequenceOutput]:
        """Append tokens [steps][sequences] that a pass sampled by itself; a negative token means non-finite logits."""
        outputs, self.step_seconds = [], seconds
        for part, column in zip(scheduled, zip(*steps, strict=True), strict=True):
            sampled = list(column) if min(column) >= 0 else list(column[: leading(token >= 0 for token in column)])
            if sampled:
                self._states[part.sequence.id].sampler.follow(sampled)
            output = self._advance(part, sampled) if sampled else SequenceOutput(part.sequence.id)
            if len(sampled) < len(column) and output.finish_reason is None:
                ended = self._finish(part.sequence, "error", not_finite())
                output = replace(ended, tokens=output.tokens)
            outputs.append(output)
        return outputs


def _windows(config: ModelConfig, shape: CacheShape) -> WindowPool | None:
    if not shape.window_blocks or config.longest_window is None:
        return None
    return WindowPool(shape.window_blocks, config.longest_window, shape.block_size)
