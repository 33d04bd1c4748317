"""Many sequences on one model: schedule, run, sample, until everybody has what was asked for.

A reply is `submit` and then `step` until it ends; samples are forks of one, a file of prompts is many of them. Every
sequence draws from random numbers of its own, so a seeded reply is the same alone or among others. One thread calls
everything here. Knows ids and logits; does not know text, or who asked.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.prefix_index import PrefixIndex
from mycli.runtime.cache.prefix_store import PrefixStore
from mycli.runtime.cache.state_pool import StatePool
from mycli.runtime.engine.ahead import LaunchesAhead
from mycli.runtime.engine.drawing import Live, draft_tokens, draw_tokens, pass_listener
from mycli.runtime.engine.kept_texts import KeptTexts
from mycli.runtime.engine.model_runner import CacheShape, ModelRunner
from mycli.runtime.engine.scheduler import Scheduler
from mycli.runtime.engine.sequence import FinishReason, Request, SequenceOutput
from mycli.runtime.engine.sequence import Sequence as Sequence_
from mycli.runtime.engine.speculation import Speculator
from mycli.runtime.engine.stats import EngineStats
from mycli.runtime.engine.turns import Limits, Turn
from mycli.runtime.errors import UserError
from mycli.runtime.memory.estimate import state_slots
from mycli.runtime.memory.plan import prefill_chunk
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.sampling.sampler import leading, not_finite

_OF_A_PASS = ("stop", "length", "context")  # ends that a pass brings, which went well so far


class Engine:
    """One model, its cache, and everybody who wants something of them."""

    def __init__(
        self,
        runner: ModelRunner,
        shape: CacheShape,
        vocab_size: int,
        *,
        running: int | None = None,
        chunk: int | None = None,
        kept_blocks: int | None = None,
        speculator: Speculator | None = None,
        store: PrefixStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """vocab_size: ids that may be drawn; running: sequences at once, None for one for each block; chunk: tokens of
        prompts in a pass; kept_blocks: of texts that nobody uses any more, None for as many as there are; store:
        keeps texts over restarts.
        """
        self.runner, self.shape, self.speculator = runner, shape, speculator
        running = running or shape.blocks
        slots = state_slots(runner.config, running)
        self.cache = runner.make_cache(shape, slots)
        runner.rope(shape.context)  # made now, not in the time of the first reply
        self._vocab_size = vocab_size
        states = StatePool(slots) if runner.config.has_recurrent else None
        pool = BlockPool(shape.blocks, PrefixIndex(shape.block_size, kept_blocks, states))
        chunk = chunk or prefill_chunk(runner.device.type == "cuda")
        self._kept = None if store is None else KeptTexts(store, self.cache, self._make_copies)
        self.scheduler = Scheduler(pool, Limits(shape.context, chunk, running), clock, self._kept)
        self.step_seconds = 0.0  # of the last step: of the device, where it worked ahead
        self._live: dict[int, Live] = {}
        self._ahead = LaunchesAhead(runner, self.cache)
        self._cancelled: list[SequenceOutput] = []
        self._sure = True  # of what the cache holds: no pass broke off

    @property
    def context(self) -> int:
        """Tokens of a sequence at most."""
        return self.shape.context

    @property
    def nbytes(self) -> int:
        """Bytes of weights and caches."""
        return self.runner.nbytes + self.cache.nbytes + (0 if self.speculator is None else self.speculator.nbytes)

    @property
    def tokens_read(self) -> int:
        """Tokens in the cache, of the sequence that has most: how far a prompt has been read."""
        return max((one.table.length for one in self.scheduler.running), default=0)

    @property
    def shares_cores(self) -> bool:
        """Whether its passes run on the CPU's cores."""
        return self.runner.device.type == "cpu"

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do or to tell."""
        return self.scheduler.has_work or bool(self._cancelled)

    @property
    def stats(self) -> EngineStats:
        """How it is doing."""
        counts, pool = self.scheduler.counts, self.scheduler.pool
        waiting = len(self.scheduler.waiting) + sum(len(one.branches) for one in self.scheduler.running)
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=waiting,
            preemptions=counts.preemptions,
            cache_used=pool.used,
            cache_kept=pool.index.idle,
            cache_blocks=pool.blocks,
            prefix_queries=counts.queries,
            prefix_hits=counts.hits,
            misses=dict(counts.misses),
            kept=None if self._kept is None else self._kept.stats,
        )

    def submit(self, request: Request) -> int:
        """Queue a request: the number of its sequence.

        Raises UsageError for what can never be answered: a prompt that is empty or does not fit, a bias of a token that
        there is not.
        """
        live = self._start(request)
        number = self.scheduler.submit(request).id
        self._live[number] = live
        return number

    def branch(self, sequence: int, count: int) -> list[int]:
        """`count` more replies to the prompt of a sequence that has not drawn yet; the prompt is read once for all.

        The seed of the first is one more than that of the sequence, and so on. Raises ValueError for a sequence that
        has drawn or ended.
        """
        first = self.scheduler.get(sequence)
        if first is None:
            raise ValueError(f"sequence {sequence} has ended")
        numbers = []
        for index in range(1, count + 1):
            sampling = first.request.sampling.for_reply(index)
            request = replace(first.request, sampling=sampling, prompt_logprobs=False)
            live = self._start(request)
            numbers.append(self.scheduler.branch(first, request).id)
            self._live[numbers[-1]] = live
        return numbers

    def _start(self, request: Request) -> Live:
        return Live.start(request, self._vocab_size, self.runner.device)

    def cancel(self, sequence: int) -> None:
        """It has no more turns, and its blocks are free now; the next step says so. Nothing where it has ended."""
        found = self.scheduler.get(sequence)
        if found is not None:
            self._cancelled.append(self._end(found, "cancelled"))

    def forget(self) -> None:
        """Keep nothing of the texts so far, as if the cache were new."""
        self.scheduler.pool.clear()
        self._sure = True
        if self.speculator is not None:
            self.speculator.forget()

    def close(self) -> None:
        """Write down what is to be kept over a restart; nothing is run after that."""
        if self._kept is not None:
            self._kept.close()

    def _make_copies(self) -> None:
        """Of blocks and states, as they were noted down."""
        pool = self.scheduler.pool
        for source, target in pool.take_copies():
            self.cache.copy(source, target)
        for source, target in () if pool.states is None else pool.states.take_copies():
            self.cache.states.copy(source, target)

    def step(self) -> list[SequenceOutput]:
        """One pass: what it did for each of its sequences, and who has ended since the last step."""
        began = time.perf_counter()
        outputs, self._cancelled = self._cancelled, []
        outputs += [self._end(sequence, "deadline") for sequence in self.scheduler.expired()]
        speculator = self.speculator
        decoding = 0 if speculator is None else sum(one.decoding for one in self.scheduler.running)

        def drafts(sequence: Sequence_, room: int) -> int:
            sampler = self._live[sequence.id].sampler
            if speculator is None or sampler.constrained:
                return 0
            return speculator.wanted(sequence.id, sequence.tokens, room, decoding)

        turns = self.scheduler.schedule(drafts)
        self._make_copies()
        self.step_seconds = 0.0
        if turns:
            self._sure = False
            # A speculator measures plain passes, to know whether drafting pays, and may want their hidden states.
            made = None if self.speculator is not None else self._ahead.made(turns, self._live, self.scheduler)
            outputs += self._pass(turns, began) if made is None else self._decoded_ahead(turns, *made)
            self._sure = True
        self.step_seconds = max(self.step_seconds, time.perf_counter() - began)
        return outputs

    def _pass(self, turns: Sequence[Turn], began: float) -> list[SequenceOutput]:
        """Run the turns, and draw for those who have read all they have; the step `began` at this time."""
        drafted = draft_tokens(self.speculator, turns, self._live)
        chunks = [turn.chunk(drafted.get(turn.sequence.id, [])) for turn in turns]
        logits = self.runner.run(chunks, self.cache, pass_listener(self.speculator, turns, chunks))
        draws: list[tuple[Turn, range]] = []
        scores: dict[int, tuple[TokenLogprob, ...]] = {}
        everyone, end = list(turns), 0
        for turn, chunk in zip(turns, chunks, strict=True):
            rows, end = range(end, end + chunk.logits), end + chunk.logits
            if turn.scored:
                number = turn.sequence.id
                scores[number], rows = self._live[number].score(turn, logits[rows.start : end]), rows[-1:]
            if turn.completes and turn.sequence.limit:
                forks = self.scheduler.begin_branches(turn)
                draws += [(one, rows) for one in (turn, *forks)]
                everyone += forks
        drawn = draw_tokens(draws, drafted, logits, self._live, self.speculator)
        outputs = [self._advance(turn, drawn.get(turn.sequence.id, []), scores, drafted) for turn in everyone]
        if self.speculator is not None and turns[0].decodes:
            results = [(one.sequence, one.drafted, one.accepted) for one in outputs]
            self.speculator.observe(results, time.perf_counter() - began)
        return outputs

    def _advance(
        self,
        turn: Turn,
        drawn: list[int] | UserError,
        scores: dict[int, tuple[TokenLogprob, ...]],
        drafted: dict[int, list[int]],
    ) -> SequenceOutput:
        sequence = turn.sequence
        guessed = len(drafted.get(sequence.id, []))
        if isinstance(drawn, UserError):
            self._settle(turn, 0)
            return self._end(sequence, "error", drawn)
        tokens, reason = self.scheduler.advance(turn, drawn)
        if guessed:
            self._settle(turn, sequence.table.length - turn.start)
        output = SequenceOutput(
            sequence.id,
            tokens,
            self._live[sequence.id].tell(len(tokens)),
            scores.get(sequence.id, ()),
            reason,
            sequence.cached,
            sequence.miss,
            sequence.queued,
            guessed,
            len(drawn) - 1 if guessed else 0,
        )
        if self.speculator is not None and guessed:
            self.speculator.keep(sequence.id, sequence.table.length)
        if reason is not None:
            self._end(sequence, reason)
        return output

    def _settle(self, turn: Turn, count: int) -> None:
        """The state after the first `count` tokens of a turn with drafted ones, where layers keep any."""
        if turn.sequence.table.state is not None:
            self.cache.states.commit_drafts(turn.sequence.table.state, count)

    def _end(self, sequence: Sequence_, reason: FinishReason, error: UserError | None = None) -> SequenceOutput:
        """Its place is free. What it leaves in the cache is kept for texts that begin alike, unless it went wrong."""
        if self._kept is not None and error is None and (self._sure or reason in _OF_A_PASS):
            self._kept.keep(sequence.tokens, sequence.table)
        self.scheduler.end(sequence, wrong=error is not None)
        del self._live[sequence.id]
        if self.speculator is not None:
            self.speculator.end(sequence.id, sequence.tokens)
        return SequenceOutput(
            sequence.id,
            finish_reason=reason,
            cached_tokens=sequence.cached,
            cache_miss=sequence.miss,
            queued=sequence.queued,
            error=error,
        )

    def _decoded_ahead(self, turns: Sequence[Turn], made: list[list[int]], seconds: float) -> list[SequenceOutput]:
        """What tokens [steps][sequences], made in so long, mean for the turns; one below 0 stands for logits that were
        not numbers."""
        outputs, self.step_seconds = [], seconds
        for turn, column in zip(turns, zip(*made, strict=True), strict=True):
            drawn = list(column[: leading(token >= 0 for token in column)])
            output = self._advance(turn, drawn, {}, {}) if drawn else SequenceOutput(turn.sequence.id)
            if len(drawn) < len(column) and output.finish_reason is None:
                ended = self._end(turn.sequence, "error", not_finite())
                output = replace(ended, tokens=output.tokens)
            outputs.append(output)
        return outputs
