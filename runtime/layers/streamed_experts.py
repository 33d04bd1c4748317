"""A mixture with more experts than memory holds: a few of each layer in slots, the rest read from disk on demand.

A slot is the memory of one expert's products, allocated once and overwritten by the next expert. Experts are read
(`pread`) rather than mapped: a file that is truncated meanwhile is an error, not a crash. They are laid out as kernels
expect, so products have the same bits as with all experts in memory. An evicted expert is often still in the page
cache, from which reading is ten times as fast as from disk.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from mycli.runtime.cache.slot_cache import SlotCache
from mycli.runtime.checkpoint import formats
from mycli.runtime.kernels.cpu.matmul import CpuMatmul, gather_codes
from mycli.runtime.kernels.routed import Route
from mycli.runtime.layers.feed_forward import Experts
from mycli.runtime.layers.layer_part import Steps
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.quantization.packed_weight import Matmul


@dataclass
class ExpertReads:
    """Counts of expert lookups in all layers of a model.

    requested, resident: experts chosen by passes (once a pass), and those found in memory; nbytes, seconds: of reading
    the others.
    """

    requested: int = 0
    resident: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def since(self, before: "ExpertReads") -> "ExpertReads":
        return ExpertReads(
            self.requested - before.requested,
            self.resident - before.resident,
            self.nbytes - before.nbytes,
            self.seconds - before.seconds,
        )

    @property
    def hit_rate(self) -> float:
        return self.resident / self.requested if self.requested else 1.0

    @property
    def gigabytes_per_second(self) -> float | None:
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else None


class StreamedExperts(Experts):
    """Experts of which `slots` are in memory at a time, on the CPU; the others are read when they are chosen."""

    def __init__(self, spec: ExpertsSpec, slots: int, reads: ExpertReads) -> None:
        super().__init__(spec)
        self._reads = reads
        self._slots = SlotCache(slots)
        self._free: list[tuple[Sequence[Matmul], ...]] = []  # memory of empty slots
        self._weights: CheckpointWeights | None = None
        self.uniform = True  # all experts are stored alike, so the layout of one is that of all

    @property
    def resident_products(self) -> tuple[Linear, ...]:
        return self.shared_products

    def freeze(self) -> None:
        """Do nothing: the experts in memory change from pass to pass."""

    def load_own(self, weights: CheckpointWeights) -> None:
        """Read the router and fill the slots with the first experts, so that all memory is taken before a pass runs."""
        super().load_own(weights)
        self._weights = weights
        layouts = {
            tuple(
                (weights.packings.get(spec.name), spec.out_features, spec.bias)
                for linear in pair
                for spec in linear.specs
            )
            for pair in zip(self.gate_up, self.down, strict=True)
        }
        self.uniform = len(layouts) == 1
        first = range(min(self._slots.slots, len(self.gate_up)))
        # Small weights are moved into one allocation, as `load_linears` does for resident ones.
        self._take(first)
        matmuls = (matmul for expert in first for linear in self._pair(expert) for matmul in linear.matmuls)
        gather_codes([matmul for matmul in matmuls if isinstance(matmul, CpuMatmul) and matmul.small])

    def route_tokens(self, route: Route, tokens: Tensor) -> Steps:
        outputs: Tensor | None = None
        for positions in self.pieces(route.hit):
            piece, pairs = route.part(positions)
            piece_outputs = yield from super().route_tokens(piece, tokens)
            if outputs is None:
                outputs = piece_outputs.new_empty(len(route.tokens), piece_outputs.shape[1])
            outputs[pairs] = piece_outputs
        assert outputs is not None
        return outputs

    def pieces(self, hit: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield positions in `hit`, each once, whose experts are in memory until the next piece is requested.

        Raises what reading raises, such as ModelError for a file that changed; the slots stay usable.
        """
        positions = {expert: position for position, expert in enumerate(hit)}
        plan, reads = self._slots.plan(hit), self._reads
        reads.requested += len(hit)
        reads.resident += sum(expert in self._slots for expert in hit)
        for index, piece in enumerate(plan):
            for next_piece in plan[index + 1 : index + 2]:  # the system reads it while this one is multiplied
                self._prefetch(next_piece)
            began = time.perf_counter()
            if nbytes := self._take(piece):
                reads.nbytes += nbytes
                reads.seconds += time.perf_counter() - began
            yield [positions[expert] for expert in piece]

    def _pair(self, expert: int) -> tuple[Linear, Linear]:
        return self.gate_up[expert], self.down[expert]

    def _prefetch(self, experts: Sequence[int]) -> None:
        # All requests in one go: a disk serves many in the time of one.
        assert self._weights is not None
        for expert in experts:
            for linear in self._pair(expert):
                formats.prefetch_linears(self._weights.checkpoint, linear.specs, self._weights.packings)

    def _take(self, piece: Sequence[int]) -> int:
        new, nbytes = self._slots.load(piece), 0
        for _, victim in new:
            if victim is not None:
                self._free.append(tuple(linear.matmuls for linear in self._pair(victim)))
                self._empty(victim)
        self._prefetch([expert for expert, _ in new])
        for index, (expert, _) in enumerate(new):
            try:
                nbytes += self._read(expert)
            except BaseException:
                for unread, _ in new[index:]:
                    self._slots.drop(unread)
                    self._empty(unread)
                raise
        return nbytes

    def _read(self, expert: int) -> int:
        assert self._weights is not None
        memory = self._free[-1] if self._free else ((), ())
        for linear, into in zip(self._pair(expert), memory, strict=True):
            linear.load(self._weights, into)
        del self._free[-1:]  # only now: after a failed read the slot's memory stays free
        return sum(linear.nbytes for linear in self._pair(expert))

    def _empty(self, expert: int) -> None:
        for linear in self._pair(expert):
            linear.replace(None)
