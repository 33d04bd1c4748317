"""Tokens that are made ahead, several of each sequence, where nobody has to look at one before the next.

Knows turns, samplers and the loop of a runner; does not know what the tokens mean for a reply.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.drawing import Live
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.scheduler import Scheduler
from mycli.runtime.engine.turns import Turn
from mycli.runtime.sampling.sampler import DeviceSampling


class LaunchesAhead:
    """Launches of the runner's loop, for sequences that are the same from one pass to the next."""

    def __init__(self, runner: ModelRunner, cache: KVCache) -> None:
        self._runner, self._cache = runner, cache
        self._places: tuple[tuple[int, int], ...] = ()
        self._launches: Iterator[tuple[list[list[int]], float]] | None = None

    def made(
        self, turns: Sequence[Turn], live: Mapping[int, Live], scheduler: Scheduler
    ) -> tuple[list[list[int]], float] | None:
        """The next tokens [steps][sequences] after those of `turns`, and the seconds they took; None where the device
        does not make them.

        It does where all decode and draw alike. Several sequences draw from random numbers of their own, which the
        device does not have: they are greedy.
        """
        if not self._runner.passes.makes_tokens or any(not turn.decodes or turn.drafts for turn in turns):
            return None
        first, *others = [live[turn.sequence.id].sampler.device_sampling() for turn in turns]
        if first is None or any(one is None or replace(one, seed=first.seed) != first for one in others):
            return None
        if others and first.temperature:
            return None
        return self._next(turns, first, scheduler)

    def _next(
        self, turns: Sequence[Turn], choice: DeviceSampling, scheduler: Scheduler
    ) -> tuple[list[list[int]], float] | None:
        """What was made ahead for others is dropped."""
        places = tuple((turn.sequence.id, turn.sequence.table.blocks[0]) for turn in turns)
        found = None
        if self._launches is not None and places == self._places:
            found = next(self._launches, None)
        if found is None:
            left = scheduler.room_ahead(turns, min(turn.sequence.limit - turn.sequence.drawn for turn in turns))
            chunks: list[Chunk] = [turn.chunk([]) for turn in turns]
            stops = frozenset[int]().union(*[turn.sequence.request.stop_ids for turn in turns])
            self._places = places
            self._launches = self._runner.tokens(chunks, choice, self._cache, left, stops)
            found = None if self._launches is None else next(self._launches, None)
        return found
