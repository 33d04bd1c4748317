"""The levels of a ggml type: integers, a table, or a codebook of vectors; rounds single values and columns to them."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mycli.quant.rounding.columns import solve_block

_CANDIDATES = 4  # codebook rows compared with the full metric; a power of two
_SMALLEST = 1e-20  # stands for a scale of zero, so that quotients stay finite
_SEARCHED = 1 << 24  # distances to codebook rows at a time: 64 MB


class Levels(Protocol):
    """largest: the largest magnitude; signed: whether a negative scale gives other values; unit: columns in a vector.

    range: (low, high, count), candidates for the level of the largest weight of a group, as multiples of `largest`.
    """

    @property
    def largest(self) -> int: ...
    @property
    def signed(self) -> bool: ...
    @property
    def unit(self) -> int: ...
    @property
    def range(self) -> tuple[float, float, int]: ...

    def nearest(self, values: Tensor, weights: Tensor) -> Tensor:
        """Return levels fp32 for values [..., size] in units of the scale; `weights` [..., size] of squared errors."""
        ...

    def solve(self, residual: Tensor, matrix: Tensor, scales: Tensor, levels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return new levels int8 and shifts fp32 [C, N], column by column, as `rounding.columns.solve_block`."""
        ...


@dataclass(frozen=True)
class Integers:
    """The 2 ** bits integers from `low`."""

    bits: int
    low: int
    unit: ClassVar[int] = 1

    @property
    def largest(self) -> int:
        return max(-self.low, self.low + (1 << self.bits) - 1)

    @property
    def signed(self) -> bool:
        return self.low < 0

    @property
    def range(self) -> tuple[float, float, int]:
        # As in `rounding.grid`: with weighted columns more clipping pays, the more so with fewer bits.
        return {3: (0.8, 4.0, 32), 4: (0.85, 3.0, 32)}.get(self.bits, (0.95, 1.5, 24))

    def nearest(self, values: Tensor, weights: Tensor) -> Tensor:
        return values.round().clamp_(self.low, self.low + (1 << self.bits) - 1)

    def solve(self, residual: Tensor, matrix: Tensor, scales: Tensor, levels: Tensor | None) -> tuple[Tensor, Tensor]:
        half = 1 << (self.bits - 1)
        scales = torch.where(scales == 0, _SMALLEST, scales)
        codes = None
        if levels is None:
            # The native solver has codes around `half`: levels from `low` on become such codes by shifting the target.
            residual = residual - (self.low + half) * scales
        else:
            codes = (levels.to(torch.int16) - self.low).to(torch.uint8).contiguous()
        solved, shifts = solve_block(residual.contiguous(), matrix, scales.contiguous(), codes, half)
        return (solved.to(torch.int16) + self.low).to(torch.int8), shifts


@dataclass(frozen=True)
class Table:
    """Levels from a table of sorted values."""

    values: tuple[int, ...]
    signed: ClassVar[bool] = True
    unit: ClassVar[int] = 1
    range: ClassVar[tuple[float, float, int]] = (0.85, 3.0, 32)

    @property
    def largest(self) -> int:
        return max(map(abs, self.values))

    @cached_property
    def _entries(self) -> tuple[Tensor, Tensor]:
        table = torch.tensor(self.values, dtype=torch.float32)
        return table, (table[:-1] + table[1:]) / 2

    def nearest(self, values: Tensor, weights: Tensor) -> Tensor:
        table, middles = (part.to(values.device) for part in self._entries)
        return table[torch.bucketize(values, middles)]

    def solve(self, residual: Tensor, matrix: Tensor, scales: Tensor, levels: Tensor | None) -> tuple[Tensor, Tensor]:
        # In torch: the native solver has evenly spaced levels only.
        shifts, solved = torch.zeros_like(residual), torch.empty(residual.shape, dtype=torch.int8)
        scales = torch.where(scales == 0, _SMALLEST, scales)
        for index, scale in enumerate(scales):
            value = torch.addmv(residual[index], shifts[:index].T, matrix[:index, index], alpha=-1)
            pivot = matrix[index, index]
            if levels is None:
                level = self.nearest(value / scale, value)
                shifts[index] = (value - level * scale) / pivot
            else:
                old = levels[index].float()
                level = self.nearest(value / pivot / scale + old, value)
                shifts[index] = (level - old) * scale
            solved[index] = level.to(torch.int8)
        return solved, shifts


@dataclass(frozen=True)
class Codebook:
    """Vectors of eight: one or two rows of a codebook of magnitudes, with signs.

    `even_signs`: the number of minus signs of eight is even, because only seven are stored.
    """

    rows: Tensor  # int8 [rows, 4 or 8]
    even_signs: bool
    signed: ClassVar[bool] = False
    unit: ClassVar[int] = 8
    range: ClassVar[tuple[float, float, int]] = (0.6, 2.4, 16)

    @property
    def largest(self) -> int:
        return int(self.rows.max())

    @cached_property
    def _magnitudes(self) -> Tensor:
        return self.rows.float()

    def nearest(self, values: Tensor, weights: Tensor) -> Tensor:
        # Weights are the same for all rows: [rows, groups, size] becomes [vectors of a row, rows, 8].
        vectors = values.reshape(len(values), -1, self.unit).transpose(0, 1).contiguous()
        metric = weights.reshape(-1, self.unit)
        signs = self._signs(vectors, metric)
        rows = self._rows(vectors * signs, metric, 1)
        levels = torch.cat([self._magnitudes[part.squeeze(2)] for part in rows], 2).mul_(signs)
        return levels.transpose(0, 1).reshape(values.shape)

    def _signs(self, vectors: Tensor, weights: Tensor) -> Tensor:
        """Return signs for vectors [V, N, 8]; `weights` [V, 8] of squared errors."""
        signs = torch.where(vectors < 0, -1.0, 1.0)
        if self.even_signs:
            # The eighth sign is the parity of the other seven. Where the parity is wrong, flip the sign that costs
            # least.
            odd = signs.prod(2) < 0
            cheapest = (weights.unsqueeze(1) * vectors.square()).argmin(2, keepdim=True)
            flipped = signs.scatter(2, cheapest, -signs.gather(2, cheapest))
            signs = torch.where(odd.unsqueeze(2), flipped, signs)
        return signs

    def _rows(self, vectors: Tensor, weights: Tensor, count: int) -> list[Tensor]:
        """Return indices [V, N, count] of close codebook rows for each part of the vectors [V, N, 8]."""
        width, rows = self._magnitudes.shape[1], len(self._magnitudes)
        step = max(1, _SEARCHED // (rows * vectors.shape[1]))
        table = self._magnitudes.T
        parts = []
        for start in range(0, self.unit, width):
            part = slice(start, start + width)
            nearest = torch.empty(*vectors.shape[:2], count, dtype=torch.int64)
            for first in range(0, len(vectors), step):
                chunk = slice(first, first + step)
                x, w = vectors[chunk, :, part], weights[chunk, part].unsqueeze(2)
                # Weighted squared distances without the term w x^2, which all rows share, as one matrix product:
                # x (-2 w c) + 1 (w c^2).
                factors = torch.cat([-2 * w * table, (w * table.square()).sum(1, keepdim=True)], 1)
                distances = torch.cat([x, x.new_ones(*x.shape[:2], 1)], 2) @ factors
                # For several candidates, the closest row of each of `count` parts of the codebook: not quite the
                # closest rows, but much cheaper than a top-k.
                nearest[chunk] = distances.view(*x.shape[:2], count, -1).argmin(3)
            parts.append(nearest + torch.arange(count) * (rows // count))
        return parts

    def _choose(self, target: Tensor, scale: Tensor, metric: Tensor, old: Tensor | None) -> Tensor:
        # Return levels fp32 [8, N] that minimize e^T metric e, e = target - scale * levels, among a few close rows and
        # `old`. Including `old` makes sure that descent never increases the error.
        vectors, weights = (target / scale).T.unsqueeze(0), metric.diagonal().unsqueeze(0)
        signs = self._signs(vectors, weights)
        parts = [self._magnitudes[rows[0]] for rows in self._rows(vectors * signs, weights, _CANDIDATES)]
        vectors, signs = vectors[0], signs[0]
        if len(parts) == 1:
            candidates = parts[0]
        else:
            first, second = torch.meshgrid(torch.arange(_CANDIDATES), torch.arange(_CANDIDATES), indexing="ij")
            candidates = torch.cat([parts[0][:, first.flatten()], parts[1][:, second.flatten()]], 2)
        candidates = candidates * signs.unsqueeze(1)
        if old is not None:
            candidates = torch.cat([candidates, old.T.unsqueeze(1)], 1)
        errors = (vectors.unsqueeze(1) - candidates).mul_(scale.view(-1, 1, 1))
        costs = ((errors @ metric) * errors).sum(-1)
        best = costs.argmin(1).view(-1, 1, 1).expand(-1, 1, self.unit)
        return candidates.gather(1, best).squeeze(1).T

    def solve(self, residual: Tensor, matrix: Tensor, scales: Tensor, levels: Tensor | None) -> tuple[Tensor, Tensor]:
        shifts, solved = torch.zeros_like(residual), torch.empty(residual.shape, dtype=torch.int8)
        scales = torch.where(scales == 0, _SMALLEST, scales)
        for start in range(0, len(residual), self.unit):
            part = slice(start, start + self.unit)
            value = torch.addmm(residual[part], matrix[:start, part].T, shifts[:start], alpha=-1)
            square, scale = matrix[part, part], scales[start]
            if levels is None:
                # The factor's square is what later columns cannot compensate: its inverse is the metric.
                inverse = torch.linalg.solve_triangular(square, torch.eye(self.unit), upper=True)
                chosen = self._choose(value, scale, inverse @ inverse.T, None)
                shifts[part] = inverse.T @ (value - chosen * scale)
            else:
                old = levels[part].float()
                aim = old * scale + torch.linalg.solve(square, value)
                chosen = self._choose(aim, scale, square, old)
                shifts[part] = (chosen - old) * scale
            solved[part] = chosen.to(torch.int8)
        return solved, shifts
