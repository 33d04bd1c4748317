"""Declares a ggml type that the solver writes: its levels, its scales, and the encoding of its blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME, GgmlType

if TYPE_CHECKING:  # the names of types are read without torch
    from torch import Tensor

    from mycli.quant.ggml.levels import Levels


@dataclass(frozen=True)
class Multiples:
    """The `count` integers `first`, `first + step`, ... by which a scale may multiply the factor of its super-block."""

    first: int
    count: int
    step: int = 1

    @property
    def last(self) -> int:
        return self.first + self.step * (self.count - 1)

    def nearest(self, values: "Tensor") -> "Tensor":
        if self.count == 1:
            return values.new_full(values.shape, self.first)
        steps = ((values - self.first) / self.step).nan_to_num(0.0).round_().clamp_(0, self.count - 1)
        return steps.mul_(self.step).add_(self.first)


ONE = Multiples(1, 1)  # for types without super-blocks, whose scales are fp16 factors


@dataclass(frozen=True)
class SolvedRows:
    """Rows of blocks before encoding, transposed: level * factor * unit * multiple - factor * minimum.

    levels: int8 [K, N]; multiples, minima: integers as fp32 [G, N]; factors: fp16 values as fp32 [1 or 2, blocks, N],
    of the scales and, if the type has them, of the minima.
    """

    levels: "Tensor"
    factors: "Tensor"
    multiples: "Tensor"
    minima: "Tensor | None" = None


@dataclass(frozen=True)
class SolvedBlocks:
    """Solved rows with a row for each block, to be encoded.

    levels: int16 [n, block]; scales, minima: multiples int16 [n, groups]; factors: the bytes of each, uint8 [n, 2].
    """

    levels: "Tensor"
    scales: "Tensor"
    minima: "Tensor | None"
    factors: "list[Tensor]"


@dataclass(frozen=True)
class BlockType:
    """A quantized type of ggml; `encode` returns the parts of its blocks in their order in memory, each [n, bytes]."""

    name: str
    levels: "Callable[[], Levels]"
    encode: "Callable[[SolvedBlocks], list[Tensor]]"
    scales: Multiples = ONE
    minima: Multiples | None = None
    unit: float = 1.0  # of a scale: factor * unit * multiple

    @property
    def stored(self) -> GgmlType:
        return TYPES_BY_NAME[self.name]

    @property
    def group(self) -> int:
        return self.stored.group

    @property
    def nests_minima(self) -> bool:
        """Whether minima are multiples, which have no sign, of a factor; otherwise each group has one of any sign."""
        return self.minima is not None and self.minima.count > 1

    def scale_values(self, solved: SolvedRows) -> "Tensor":
        """Return the scales, fp32 [G, N]."""
        # Exact: factors have 11 significant bits and multiples at most 8, so their product fits the 24 of fp32. Readers
        # therefore compute the same scales whatever their order of multiplication.
        repeats = len(solved.multiples) // solved.factors.shape[1]
        return (solved.factors[0] * self.unit).repeat_interleave(repeats, 0) * solved.multiples

    def minimum_values(self, solved: SolvedRows) -> "Tensor | None":
        """Return the values that are subtracted, fp32 [G, N]."""
        if solved.minima is None:
            return None
        return solved.factors[1].repeat_interleave(len(solved.minima) // solved.factors.shape[1], 0) * solved.minima

    def weights(self, solved: SolvedRows) -> "Tensor":
        """Return the weights as every reader computes them, fp32 [K, N]."""
        scales = self.scale_values(solved).repeat_interleave(self.group, 0)
        minima = self.minimum_values(solved)
        values = solved.levels.float().mul_(scales)
        return values if minima is None else values.sub_(minima.repeat_interleave(self.group, 0))
