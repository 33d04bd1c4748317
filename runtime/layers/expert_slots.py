"""Experts that are more than memory holds: a few of each layer in slots, the others in their files until chosen.

A slot is the memory of one expert's products, taken once, into which another is read: copied (`pread`), so that a file
that shrinks is an error, and laid out as kernels want it, so that products have the bits that they have in a model all
in memory. What was given up may still be in the system's page cache, from which reading is ten times as fast as from a
disk. Knows linears by their numbers; does not know who chooses, nor how many slots there should be.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mycli.runtime.cache.slot_cache import SlotCache
from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.kernels.cpu.matmul import CpuMatmul, gather_codes
from mycli.runtime.layers.linear import Linear
from mycli.runtime.quantization.packed_weight import Matmul
from mycli.runtime.quantization.scheme import Packing


@dataclass
class ExpertReads:
    """How experts were found, in all layers of a model: how many were asked for, and how many of them were in memory.

    An expert that several tokens of a pass chose was asked for once. nbytes, seconds: of reading the others.
    """

    asked: int = 0
    found: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def since(self, before: "ExpertReads") -> "ExpertReads":
        """What came after `before`."""
        return ExpertReads(
            self.asked - before.asked,
            self.found - before.found,
            self.nbytes - before.nbytes,
            self.seconds - before.seconds,
        )

    @property
    def hit_rate(self) -> float:
        """The share that was in memory; 1 where nothing was asked for."""
        return self.found / self.asked if self.asked else 1.0

    @property
    def gigabytes_per_second(self) -> float | None:
        """10^9 bytes of experts as they lie in memory, over the time to read and lay them out; None of none."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else None


@dataclass(frozen=True)
class ExpertSource:
    """Where experts are read from, how they are stored, in which precision they are held, and what is counted.

    `slots`: experts of each layer that are in memory.
    """

    checkpoint: Checkpoint
    packings: Mapping[str, Packing]
    device: torch.device
    dtype: torch.dtype
    slots: int
    reads: ExpertReads = field(default_factory=ExpertReads)


class ExpertSlots:
    """The slots of one layer, over its experts' two linears each, by number."""

    def __init__(self, source: ExpertSource, gate_up: Sequence[Linear], down: Sequence[Linear]) -> None:
        """The first experts are read at once, so that what they take is taken before anything runs."""
        self._source = source
        self._products = tuple(zip(gate_up, down, strict=True))
        self._cache = SlotCache(source.slots)
        self._free: list[tuple[Sequence[Matmul], ...]] = []  # memory of slots that hold nothing
        first = range(min(source.slots, len(self._products)))
        self._take(first)
        matmuls = (each for index in first for linear in self._products[index] for each in linear.matmuls)
        gather_codes([each for each in matmuls if isinstance(each, CpuMatmul) and each.small])

    @property
    def alike(self) -> bool:
        """Whether all experts are stored alike, so that what is known of one in memory is true of all."""
        packings = self._source.packings
        kinds = {
            tuple((packings.get(spec.name), spec.out_features, spec.bias) for linear in pair for spec in linear.specs)
            for pair in self._products
        }
        return len(kinds) == 1

    def pieces(self, hit: Sequence[int]) -> Iterator[Sequence[int]]:
        """Places in `hit`, each once: of experts that are in memory until the next piece is asked for.

        Raises what reading raises, ModelError for a file that is not what it was: nothing else is lost by that.
        """
        places = {expert: place for place, expert in enumerate(hit)}
        plan, reads = self._cache.plan(hit), self._source.reads
        reads.asked += len(hit)
        reads.found += sum(expert in self._cache for expert in hit)
        for index, piece in enumerate(plan):
            for ahead in plan[index + 1 : index + 2]:  # is read by the system while this one is multiplied by
                self._expect(ahead)
            began = time.perf_counter()
            if nbytes := self._take(piece):
                reads.nbytes += nbytes
                reads.seconds += time.perf_counter() - began
            yield [places[expert] for expert in piece]

    def _expect(self, experts: Sequence[int]) -> None:
        """Ask the system to read them ahead, all at once: a disk answers many questions as soon as one."""
        for expert in experts:
            for linear in self._products[expert]:
                formats.expect_linears(self._source.checkpoint, linear.specs, self._source.packings)

    def _take(self, piece: Sequence[int]) -> int:
        """Have all of `piece` in memory; the bytes of those that were not."""
        new, nbytes = self._cache.take(piece), 0
        for _, victim in new:
            if victim is not None:
                self._free.append(tuple(linear.matmuls for linear in self._products[victim]))
                self._empty(victim)
        self._expect([expert for expert, _ in new])
        for place, (expert, _) in enumerate(new):
            try:
                nbytes += self._read(expert)
            except BaseException:
                for unread, _ in new[place:]:
                    self._cache.drop(unread)
                    self._empty(unread)
                raise
        return nbytes

    def _read(self, expert: int) -> int:
        """Into free memory, which is its own when it is whole; the bytes that it takes."""
        source, old = self._source, self._free[-1] if self._free else ((), ())
        for linear, into in zip(self._products[expert], old, strict=True):
            linear.load(source.checkpoint, source.packings, source.device, source.dtype, into)
        del self._free[-1:]
        return sum(linear.nbytes for linear in self._products[expert])

    def _empty(self, expert: int) -> None:
        for linear in self._products[expert]:
            linear.replace(None)
