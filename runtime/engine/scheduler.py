"""Continuous batching: chooses which sequences run in the next pass, with how many tokens, in which cache blocks.

Policy: fair among users, and among the requests of each user (`fairness`). Prompt chunks and decode steps alternate, so
a decoding sequence waits for at most one chunk (`Limits.chunk`), or two while users compete. When blocks run out, the
newest sequence of the user and the request with the most is preempted: its blocks are freed, it goes back to the queue,
and is recomputed later with the same result. The oldest sequence of a single user is not preempted for blocks, so all
finish.

Plain Python over token counts and block numbers; tensors and sampling are elsewhere.
"""

import bisect
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.block_table import BlockTable
from mycli.runtime.cache.prefix_index import PIECE, StoredPrefix
from mycli.runtime.engine.fairness import FairShares
from mycli.runtime.engine.scheduled import ScheduledSequence
from mycli.runtime.engine.sequence import FinishReason, Request, RequestSequence, Status
from mycli.runtime.engine.stats import Counts
from mycli.runtime.memory.cache_shape import LOOKAHEAD_TOKENS

# Scored prompts keep logits for every position (128 x 128,000 x 4 bytes = 64 MB), so a pass has fewer such tokens.
SCORED_CHUNK_TOKENS = 128

DraftBudget = Callable[[RequestSequence, int], int]  # draft tokens to verify for a sequence, at most the given number


@dataclass(frozen=True)
class Limits:
    """context: longest sequence in tokens; chunk: prompt tokens in a pass; running: sequences at the same time."""

    context: int
    chunk: int
    running: int


class PrefixSource(Protocol):
    """A prefix cache outside the KV cache; see `runtime.engine.disk_prefix_cache`."""

    def find(self, tokens: list[int]) -> StoredPrefix: ...

    def restore(self, stored: StoredPrefix, table: BlockTable, end: int) -> bool:
        """Fill the cache from `table.length` up to `end`; False if a piece turns out to be unusable."""
        ...


class Scheduler:
    """Owns the request queue, the running sequences and the block pool."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        prefixes: PrefixSource | None = None,
    ) -> None:
        self.pool, self.limits, self._clock = pool, limits, clock
        self._prefixes = prefixes
        self.waiting: list[RequestSequence] = []  # in order of arrival
        self.running: list[RequestSequence] = []  # likewise
        self.counts = Counts()
        self._sequences: dict[int, RequestSequence] = {}
        self._next_id = 0
        self._prefill_next = True
        self._chunk_left = limits.chunk  # prompt tokens before the next decode step
        self._last_prompt: RequestSequence | None = None  # the first of the last pass, if that computed prompts
        self._shares = FairShares()
        self._in_pass: set[int] = set()  # sequences in the pass that is being built; never preempted

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def get(self, number: int) -> RequestSequence | None:
        return self._sequences.get(number)

    def submit(self, request: Request) -> RequestSequence:
        """Append a request to the queue. Raises UsageError as `Request.reply_limit` does."""
        sequence = self._add(request, self.reply_limit(request))
        self.waiting.append(sequence)
        return sequence

    def reply_limit(self, request: Request) -> int:
        return request.reply_limit(self.limits.context, self.pool.blocks * self.pool.block_size)

    def _add(self, request: Request, limit: int, parent: RequestSequence | None = None) -> RequestSequence:
        tokens = [*request.prompt, *(() if request.start is None else request.start.tokens)]
        table = BlockTable(self.pool)
        group = request.group or (f"{self._next_id}" if parent is None else parent.group)
        sequence = RequestSequence(self._next_id, request, table, limit, self._clock(), tokens, group)
        self._sequences[sequence.id] = sequence
        self._shares.enter(sequence, len(tokens) if parent is None else 0)
        self._next_id += 1
        return sequence

    def branch(self, sequence: RequestSequence, request: Request) -> RequestSequence:
        """Add another reply to the prompt of `sequence`, which is computed once and whose blocks are shared.

        Raises ValueError once `sequence` has sampled a token.
        """
        if sequence.sampled or sequence.status is Status.FINISHED:
            raise ValueError(f"sequence {sequence.id} has sampled tokens: nothing can branch off its prompt")
        branch = self._add(request, sequence.limit, sequence)
        sequence.branches.append(branch)
        return branch

    def late(self) -> list[RequestSequence]:
        return [sequence for sequence in self.waiting if sequence.late(self._clock)]

    def schedule(self, draft_budget: DraftBudget | None = None) -> list[ScheduledSequence]:
        """Return the work of the next pass in order of arrival; an empty list if nothing can run."""
        self._in_pass.clear()
        interrupts = not self._prefill_next and self._interrupts()
        if self._prefill_next or interrupts:
            scheduled = self._schedule_prefill() or self._schedule_decode(draft_budget)
        else:
            scheduled = self._schedule_decode(draft_budget) or self._schedule_prefill()
        if not scheduled and self.waiting:
            # Beams that are computed wait for the others of their search, and may hold all blocks. Preempting the
            # newest resolves that: `beam_room` makes sure that the oldest search fits the cache alone.
            idle = [sequence for sequence in self.running if not sequence.uncomputed]
            if idle:
                self._preempt(idle[-1])
                self._shares.resume()
                return self.schedule(draft_budget)
        if not scheduled or scheduled[0].is_decode:
            self._prefill_next, self._last_prompt, self._chunk_left = True, None, self.limits.chunk
        else:
            self._chunk_left -= sum(part.count for part in scheduled)
            # The parts of a chunk that was cut for other users follow each other: more decode steps in between would
            # have fewer sequences each, at the same cost.
            cut = self._room(scheduled[-1].sequence, self.limits.chunk) < self.limits.chunk
            self._prefill_next = cut and self._chunk_left > 0 and not interrupts
            self._last_prompt = None if interrupts else scheduled[0].sequence  # a decode step follows an interruption
        return scheduled

    def _interrupts(self) -> bool:
        """Return whether a new prompt comes before the decode step that follows a chunk of another user's prompts."""
        if not self.waiting or self._last_prompt is None or self._last_prompt.status is not Status.RUNNING:
            return False
        return self._shares.interrupts(self._shares.first(self.waiting, self.running), self._last_prompt, self.running)

    def _schedule_prefill(self) -> list[ScheduledSequence]:
        prefilling = [sequence for sequence in self.running if not sequence.is_decoding]
        if not prefilling and not self.waiting:
            return []
        budget, scorable, scheduled = self.limits.chunk, SCORED_CHUNK_TOKENS, list[ScheduledSequence]()
        # A copy: reserving blocks may preempt some.
        running = deque(self._shares.ordered(prefilling, self.running))
        queue = list(self.waiting)  # a copy, too: those that are preempted in this pass wait for the next
        while budget > 0:
            waiting = self._shares.first(queue, self.running) if queue else None
            if waiting is not None and (not running or self._shares.precedes(waiting, running[0], self.running)):
                sequence = waiting
                if self._room(sequence, budget) <= 0 or not self._has_place(sequence) or not self._admit(sequence):
                    queue = self._behind(sequence, queue)
                    continue
                queue.remove(sequence)
            elif running:
                sequence = running.popleft()
            else:
                break
            part, used = self._prefill_part(sequence, budget, scorable)
            budget -= used
            if part is not None:
                scheduled.append(part)
                scorable -= part.count if part.scored else 0
                if not scorable:  # others would hold a place without work
                    queue = [other for other in queue if not other.scored]
            elif sequence is waiting and sequence.status is not Status.RUNNING:
                queue = []
        return scheduled

    def _behind(self, sequence: RequestSequence, queue: list[RequestSequence]) -> list[RequestSequence]:
        """Return the sequences of the queue that may start before one that cannot."""
        # A search that has not begun waits for the end of others, which other requests need not.
        if sequence.request.beams is None or any(other.group == sequence.group for other in self.running):
            return []  # keep the order: a shorter request behind it must not overtake
        return [other for other in queue if other.request.beams is None]

    def _prefill_part(
        self, sequence: RequestSequence, budget: int, scorable: int
    ) -> tuple[ScheduledSequence | None, int]:
        """Schedule the next prompt tokens of a running sequence; return its part, and the budget that it takes."""
        room = self._room(sequence, budget)
        if room <= 0 or sequence.status is not Status.RUNNING:
            return None, 0
        restored = self._restore(sequence, room)
        # Without tokens if the restored prefix is enough work for a pass.
        left = min(room - restored, scorable) if sequence.scored else room - restored
        count = self._chunk_length(sequence, left) if sequence.status is Status.RUNNING else 0
        if not count or not self._reserve(sequence, sequence.table.length + count):
            return None, restored
        self._in_pass.add(sequence.id)
        part = ScheduledSequence(sequence, sequence.table.length, count, scored=sequence.scored)
        return part, restored + count

    def _room(self, sequence: RequestSequence, budget: int) -> int:
        """Return how many more tokens this pass may have if it computes some of `sequence`."""
        most = self.limits.chunk
        return budget - most + self._shares.pass_size(sequence, most, self.running, self._clock())

    def _has_place(self, sequence: RequestSequence) -> bool:
        """Return whether a sequence may run now; a user or a request with more than its share makes room for it."""
        while len(self.running) >= self.limits.running or not self._blocks_for(sequence):
            others = [other for other in self.running if other.id not in self._in_pass]
            victim = self._shares.gives_way(others, sequence, self.running)
            if victim is None:
                return len(self.running) < self.limits.running  # blocks: `_admit` decides, with its prefix
            self._preempt(victim)
            self._shares.pause(victim)
        return True

    def _blocks_for(self, sequence: RequestSequence) -> bool:
        return self.pool.available >= self.pool.blocks_for(len(sequence.tokens)) - len(sequence.table.blocks)

    def _chunk_length(self, sequence: RequestSequence, budget: int) -> int:
        count = min(budget, sequence.uncomputed)
        return sequence.table.chunk_end(sequence.table.length + count) - sequence.table.length

    def _admit(self, sequence: RequestSequence) -> bool:
        """Start the first waiting sequence if all blocks of its tokens are available, reusing cached prefix blocks."""
        table, request = sequence.table, sequence.request
        # Prompt logprobs and hidden states need a pass over every position, which a cache hit would skip.
        whole = request.prompt_logprobs or request.hidden_states == "all"
        match = None if whole else table.match(sequence.tokens)
        if not self._blocks_for(sequence):
            table.release(sequence.tokens)
            return False
        table.allocate_state()
        self.waiting.remove(sequence)
        self._run(sequence)
        first = not sequence.started
        if first:
            self._shares.expect(sequence, self._clock())
            sequence.started = True
            sequence.queued = self._clock() - sequence.arrived
            sequence.cached = min(table.length, sequence.prompt_length)
            sequence.miss = "all tokens are requested" if match is None else match.miss
            self.counts.queries += sequence.prompt_length
            self.counts.hits += sequence.cached
        if match is not None and self._prefixes is not None:
            sequence.stored = self._prefixes.find(sequence.tokens)
            if _stored_end(sequence) > table.length:
                sequence.miss = sequence.stored.miss
        if first and sequence.miss:
            self.counts.misses[sequence.miss.split(" (")[0]] += 1
        return True

    def _run(self, sequence: RequestSequence) -> None:
        sequence.status = Status.RUNNING
        bisect.insort(self.running, sequence, key=_arrival)

    def _restore(self, sequence: RequestSequence, budget: int) -> int:
        """Fill the cache from the disk prefix cache, about `budget` tokens; return how much of the budget that took."""
        table, began = sequence.table, sequence.table.length
        if sequence.status is not Status.RUNNING or self._prefixes is None:
            return 0
        while table.length - began < budget and table.length < (last := _stored_end(sequence)):
            start = table.length
            # A recurrent state is stored only at the end of a piece, so everything up to there is restored together.
            end = last if table.state is not None else min((start // PIECE + 1) * PIECE, last)
            if not self._reserve(sequence, end):
                break
            if not self._prefixes.restore(sequence.stored, table, end):
                sequence.stored = StoredPrefix()
                break
            table.fill(sequence.tokens, end)
            if start <= sequence.cached < end and not sequence.sampled:
                self.counts.hits += end - sequence.cached
                sequence.cached = end
        return min(max(table.length - began, 0), budget)

    def _schedule_decode(self, draft_budget: DraftBudget | None) -> list[ScheduledSequence]:
        """Schedule the last token of every decoding sequence, and draft tokens where blocks are left."""
        scheduled = []
        for sequence in tuple(self.running):
            if not sequence.is_decoding:
                continue
            end = len(sequence.tokens)
            if sequence.status is not Status.RUNNING or not self._reserve(sequence, end):
                continue
            drafts = 0
            if draft_budget is not None:
                room = sequence.limit - sequence.sampled - 1  # the limit is within the context
                drafts = draft_budget(sequence, room) if room > 0 else 0
                if drafts and not sequence.table.reserve(end + drafts):
                    drafts = 0
            self._in_pass.add(sequence.id)
            scheduled.append(ScheduledSequence(sequence, end - 1, 1, drafts, is_decode=True))
        return scheduled

    def reserve_ahead(self, scheduled: Iterable[ScheduledSequence], count: int) -> int:
        """Reserve blocks for up to `count` tokens after the scheduled ones, without preempting; return how many fit."""
        for part in scheduled:
            table = part.sequence.table
            table.reserve(table.length + min(count, LOOKAHEAD_TOKENS))
            count = min(count, len(table.blocks) * self.pool.block_size - table.length)
        return count

    def _reserve(self, sequence: RequestSequence, end: int) -> bool:
        """Reserve blocks for the first `end` positions; False if `sequence` itself had to be preempted."""
        while not sequence.table.reserve(end):
            victim = self._shares.victim([other for other in self.running if other.id not in self._in_pass])
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: RequestSequence) -> None:
        self.counts.preemptions += 1
        sequence.table.release(sequence.tokens)
        self.running.remove(sequence)
        self._wait(sequence)

    def _wait(self, sequence: RequestSequence) -> None:
        sequence.status = Status.WAITING
        bisect.insort(self.waiting, sequence, key=_arrival)

    def start_branches(self, part: ScheduledSequence) -> list[ScheduledSequence]:
        """Start the branches of a sequence whose prompt is computed, without tokens in this pass; others wait."""
        sequence, started = part.sequence, list[ScheduledSequence]()
        branches, sequence.branches = sequence.branches, []
        if branches:
            sequence.table.fill(sequence.tokens, len(sequence.tokens))
        for branch in branches:
            branch.started, branch.cached, branch.queued = True, sequence.cached, sequence.queued
            if len(self.running) >= self.limits.running:
                self._wait(branch)
                continue
            branch.table = sequence.table.branch()
            self._run(branch)
            started.append(ScheduledSequence(branch, len(branch.tokens), 0))
        return started

    def advance(self, part: ScheduledSequence, sampled: list[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append the tokens sampled after a pass; return those that count, and why the sequence ends, if it does.

        All but the last of `sampled` are in the cache. The caller calls `finish`.
        """
        sequence = part.sequence
        self._shares.charge(sequence, part.count)
        reason: FinishReason | None = None
        computed, before = part.start + part.count, len(sequence.tokens)
        if not sampled and not sequence.limit and part.completes:
            reason = "length"
        for token in sampled:
            if token in sequence.request.stop_ids:
                reason = "stop"
                break
            sequence.tokens.append(token)
            if len(sequence.tokens) - sequence.prompt_length >= sequence.limit:
                reason = "context" if sequence.request.limit is None else "length"
                break
        sequence.table.fill(sequence.tokens, min(computed + max(len(sampled) - 1, 0), len(sequence.tokens)))
        return tuple(sequence.tokens[before:]), reason

    def finish(self, sequence: RequestSequence, *, discard_cache: bool = False) -> None:
        """Remove a sequence and free its blocks; with `discard_cache` they are not kept for prefix reuse."""
        del self._sequences[sequence.id]
        self._shares.leave(sequence)
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            for other in self._sequences.values():
                if sequence in other.branches:
                    other.branches.remove(sequence)
        sequence.status = Status.FINISHED
        if discard_cache:
            sequence.table.discard()
        else:
            sequence.table.release(sequence.tokens)
        for branch in sequence.branches:
            self._wait(branch)
        sequence.branches = []


def _stored_end(sequence: RequestSequence) -> int:
    """Return how far the stored prefix reaches; never to the last token, which is computed for its logits."""
    return min(len(sequence.stored.pieces) * PIECE, len(sequence.tokens) - 1)


def _arrival(sequence: RequestSequence) -> int:
    return sequence.id
