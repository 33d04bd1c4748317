"""Whose turn it is: which sequences are in the next pass, with which tokens, in which blocks.

First come, first served. A pass either reads prompts, at most `chunk` tokens of them together, or decodes one token of
every sequence that has read its own; the two take turns, so that nobody who is being answered waits for more than one
chunk. Where blocks run out, the sequence that came last gives up its own and waits; it is read again later, and goes
on as if nothing had been. The first that came is never the one, so everybody ends.

Plain Python: knows numbers of tokens and blocks, and a clock; does not know tensors, models or how tokens are chosen.
"""

import bisect
import time
from collections.abc import Callable, Iterable

from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.block_table import BlockTable
from mycli.runtime.engine.admission import reply_limit
from mycli.runtime.engine.restore import Restorer, TextSource
from mycli.runtime.engine.sequence import FinishReason, Request, Sequence, Status
from mycli.runtime.engine.turns import Counts, Limits, Turn

AHEAD = 8  # tokens of a reply whose places are taken before they are made, where nobody else wants them
SCORED = 128  # tokens of a prompt in a pass where the logits of all are wanted: they are vocabulary times as large


class Scheduler:
    """Owns the sequences and the pool."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        kept: TextSource | None = None,
    ) -> None:
        self.pool, self.limits, self._clock = pool, limits, clock
        self._restorer = Restorer(kept)
        self.waiting: list[Sequence] = []  # in the order they came
        self.running: list[Sequence] = []  # as well
        self.counts = Counts()
        self._sequences: dict[int, Sequence] = {}
        self._next = 0
        self._prompts_turn = True

    @property
    def has_work(self) -> bool:
        """Whether somebody waits or runs."""
        return bool(self._sequences)

    def get(self, number: int) -> Sequence | None:
        """The sequence of a number, None where it ended."""
        return self._sequences.get(number)

    def submit(self, request: Request) -> Sequence:
        """A new sequence at the end of the queue.

        Raises UsageError for an empty prompt, and with the numbers for one that can never have its turn.
        """
        limit = reply_limit(request, self.limits.context, self.pool.blocks * self.pool.block_size)
        sequence = self._new(request, limit)
        self.waiting.append(sequence)
        return sequence

    def _new(self, request: Request, limit: int) -> Sequence:
        sequence = Sequence(self._next, request, BlockTable(self.pool), limit, self._clock(), list(request.prompt))
        self._sequences[sequence.id] = sequence
        self._next += 1
        return sequence

    def branch(self, sequence: Sequence, request: Request) -> Sequence:
        """Another reply to the same prompt, which is read once for both. Before the first token is drawn only."""
        if sequence.drawn or sequence.status is Status.FINISHED:
            raise ValueError(f"sequence {sequence.id} has drawn tokens: nothing can branch off its prompt")
        other = self._new(request, sequence.limit)
        sequence.branches.append(other)
        return other

    def expired(self) -> list[Sequence]:
        """Those that have waited for their first turn as long as they may."""
        now = self._clock()
        return [
            sequence
            for sequence in self.waiting
            if not sequence.started
            and sequence.request.deadline is not None
            and now - sequence.arrived >= sequence.request.deadline
        ]

    def schedule(self, drafts: Callable[[Sequence, int], int] = lambda sequence, room: 0) -> list[Turn]:
        """The next pass, each sequence once, in the order they came; [] where nobody has anything to do.

        `drafts`: how many tokens a sequence would like to have drafted, at most so many.
        """
        if self._prompts_turn:
            turns = self._prompts() or self._decoding(drafts)
        else:
            turns = self._decoding(drafts) or self._prompts()
        self._prompts_turn = not turns or turns[0].decodes
        return turns

    def _prompts(self) -> list[Turn]:
        """Chunks of what runs and has not read all of its tokens, then of who waits."""
        budget, turns = self.limits.chunk, list[Turn]()
        for sequence in [one for one in self.running if not one.decoding]:
            budget -= self._restore(sequence, budget)
            count = self._count(sequence, budget)
            if count and sequence.status is Status.RUNNING and self._reserve(sequence, sequence.table.length + count):
                turns.append(self._reading(sequence, count))
                budget -= count
        while budget and self.waiting and len(self.running) < self.limits.running:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            budget -= self._restore(sequence, budget)
            if sequence.status is not Status.RUNNING:
                break
            count = self._count(sequence, budget)
            if not count:  # what was brought back is enough for a pass
                continue
            if not self._reserve(sequence, sequence.table.length + count):
                break
            turns.append(self._reading(sequence, count))
            budget -= count
        return turns

    def _count(self, sequence: Sequence, budget: int) -> int:
        count = min(budget, SCORED if sequence.scored else budget, sequence.missing)
        return sequence.table.pause(sequence.table.length + count) - sequence.table.length

    def _restore(self, sequence: Sequence, budget: int) -> int:
        """Bring back what is kept of its text outside the cache: how much of the budget that took."""
        before = sequence.table.length
        if sequence.status is Status.RUNNING:
            self.counts.hits += self._restorer.restore(sequence, budget, self._reserve)
        return min(max(sequence.table.length - before, 0), budget)

    def _reading(self, sequence: Sequence, count: int) -> Turn:
        return Turn(sequence, sequence.table.length, count, scored=sequence.scored)

    def _admit(self, sequence: Sequence) -> bool:
        """Let the first that waits run, if the blocks for all of its tokens are there."""
        table, pool, request = sequence.table, self.pool, sequence.request
        found = None if request.prompt_logprobs else table.match(sequence.tokens)
        if pool.available < pool.needed(len(sequence.tokens)) - len(table.blocks):
            table.release(sequence.tokens)
            return False
        table.begin()
        self.waiting.pop(0)
        self._run(sequence)
        first = not sequence.started
        if first:
            sequence.started = True
            sequence.queued = self._clock() - sequence.arrived
            sequence.cached = table.length
            sequence.miss = "the prompt's logprobs are wanted" if found is None else found.miss
            self.counts.queries += sequence.prompt
            self.counts.hits += sequence.cached
        if found is not None:
            self._restorer.find(sequence)
        if first and sequence.miss:
            self.counts.misses[sequence.miss.split(" token ")[0]] += 1
        return True

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        bisect.insort(self.running, sequence, key=_order)

    def _decoding(self, drafts: Callable[[Sequence, int], int]) -> list[Turn]:
        """One token of everybody who has read all others, and what they want drafted, where blocks are left."""
        turns = []
        for sequence in [one for one in self.running if one.decoding]:
            end = len(sequence.tokens)
            if sequence.status is not Status.RUNNING or not self._reserve(sequence, end):
                continue
            room = min(sequence.limit - sequence.drawn - 1, self.limits.context - end)
            wanted = drafts(sequence, room) if room > 0 else 0
            if wanted and not sequence.table.reserve(end + wanted):
                wanted = 0
            turns.append(Turn(sequence, end - 1, 1, wanted, decodes=True))
        return turns

    def room_ahead(self, turns: Iterable[Turn], count: int) -> int:
        """How many tokens of each, `count` at most, can follow the first of their turns: places are taken for a few,
        but of nobody."""
        for turn in turns:
            table = turn.sequence.table
            table.reserve(table.length + min(count, AHEAD))
            count = min(count, len(table.blocks) * self.pool.block_size - table.length)
        return count

    def _reserve(self, sequence: Sequence, end: int) -> bool:
        """Blocks for its positions up to `end`, from who came last where there are none. False: that was itself."""
        while not sequence.table.reserve(end):
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.counts.preemptions += 1
        sequence.table.release(sequence.tokens)
        self.running.remove(sequence)
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        bisect.insort(self.waiting, sequence, key=_order)

    def begin_branches(self, turn: Turn) -> list[Turn]:
        """Turns without tokens of those that begin with the prompt that `turn` has read; the others wait."""
        sequence, turns = turn.sequence, list[Turn]()
        forks, sequence.branches = sequence.branches, []
        if forks:
            sequence.table.fill(sequence.tokens, len(sequence.tokens))
        for fork in forks:
            if len(self.running) >= self.limits.running:
                self._wait(fork)
                continue
            fork.table, fork.cached, fork.started = sequence.table.branch(), fork.prompt, True
            fork.queued = sequence.queued
            self._run(fork)
            turns.append(Turn(fork, len(fork.tokens), 0))
        return turns

    def advance(self, turn: Turn, drawn: list[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """After the pass: `drawn` follow, of which all but the last are in the cache. What of them counts, and the end.

        The caller ends the sequence.
        """
        sequence = turn.sequence
        reason: FinishReason | None = None
        read, before = turn.start + turn.count, len(sequence.tokens)
        if turn.completes and not drawn and not sequence.limit:
            reason = "length"
        for token in drawn:
            if token in sequence.request.stop_ids:
                reason = "stop"
                break
            sequence.tokens.append(token)
            if sequence.drawn >= sequence.limit:
                reason = "context" if sequence.request.limit is None else "length"
                break
        sequence.table.fill(sequence.tokens, min(read + max(len(drawn) - 1, 0), len(sequence.tokens)))
        return tuple(sequence.tokens[before:]), reason

    def end(self, sequence: Sequence, wrong: bool = False) -> None:
        """It has no more turns, and its blocks are others'. `wrong`: what they hold is of no use to anybody."""
        del self._sequences[sequence.id]
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            for other in self._sequences.values():
                if sequence in other.branches:
                    other.branches.remove(sequence)
        sequence.status = Status.FINISHED
        if wrong:
            sequence.table.discard()
        else:
            sequence.table.release(sequence.tokens)
        for fork in sequence.branches:
            self._wait(fork)
        sequence.branches = []


def _order(sequence: Sequence) -> int:
    return sequence.id
