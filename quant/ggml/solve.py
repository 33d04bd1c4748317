"""Chooses the blocks of a ggml type for a weight and a Hessian: GPTQ order, compensation, then descent.

Scales are searched first, against the Hessian's diagonal, as multiples of super-block factors as they are stored.
Columns (or vectors of a codebook) are solved in the order of falling diagonal, each error compensated in later columns.
Descent then moves levels, multiples and factors in turn; no step increases the error.
"""

from dataclasses import replace

import torch
from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedRows
from mycli.quant.ggml.blocks import encode_rows
from mycli.quant.ggml.search import search_scales
from mycli.quant.rounding.grid import BLOCK
from mycli.quant.solvers import SOLVER_WEIGHTS
from mycli.quant.solvers.gptq import Factor, factorize

# Sweeps of descent over levels and scales. More than for plain groups, because multiples are integers: a scale moves
# only after levels have moved far enough.
BLOCK_SWEEPS = 4


def solve(weight: Tensor, kind: BlockType, hessian: Tensor, factor: Factor | None) -> Tensor:
    """Return blocks uint8 [N, bytes] for weight [N, K], `hessian`: the sum of x x^T, fp32 [K, K].

    Without a factor, weights are rounded to searched scales only.
    """
    rows = max(1, SOLVER_WEIGHTS // weight.shape[1])
    parts = [weight[start : start + rows].float() for start in range(0, len(weight), rows)]
    if factor is None:
        return torch.cat([encode_rows(search_scales(part, kind, hessian.diagonal()), kind) for part in parts])
    # Descent uses the damped Hessian that was factored: with the plain one, its optimum would follow noise in
    # directions that calibration hardly saw.
    damped = hessian.clone()
    damped.diagonal().add_(factor.damping * hessian.diagonal().mean())
    return torch.cat([encode_rows(_solve_rows(part, kind, damped, factor), kind) for part in parts])


def round_blocks(weight: Tensor, kind: BlockType) -> Tensor:
    """Return blocks uint8 [N, bytes] for weight [N, K] without data: every column has the same weight."""
    return solve(weight, kind, torch.ones(weight.shape[1], 1).expand(-1, weight.shape[1]), None)


def solving_order(hessian: Tensor, kind: BlockType) -> Tensor:
    """Return the order in which columns are solved: by falling diagonal, the columns of a vector together."""
    unit = kind.levels().unit
    order = hessian.diagonal().view(-1, unit).sum(1).argsort(descending=True, stable=True)
    return (order.unsqueeze(1) * unit + torch.arange(unit, device=order.device)).flatten()


def factor_for(hessian: Tensor, kind: BlockType) -> Factor | None:
    return factorize(hessian, solving_order(hessian, kind))


def _solve_rows(weight: Tensor, kind: BlockType, hessian: Tensor, factor: Factor) -> SolvedRows:
    target = weight.T.contiguous()
    solved = _round_columns(target, search_scales(weight, kind, hessian.diagonal()), kind, factor)
    for _ in range(BLOCK_SWEEPS):
        pull = hessian @ (target - kind.weights(solved))
        solved = _move_levels(pull, solved, kind, hessian)
        solved = _move_scales(pull, solved, kind, hessian)
    return solved


def _round_columns(target: Tensor, solved: SolvedRows, kind: BlockType, factor: Factor) -> SolvedRows:
    levels, minima, scales = kind.levels(), kind.minimum_values(solved), kind.scale_values(solved)
    group_of = factor.order // kind.group
    remaining = target[factor.order]
    ordered = torch.empty(target.shape, dtype=torch.int8, device=target.device)
    for start in range(0, len(target), BLOCK):
        block = slice(start, start + BLOCK)
        aim = remaining[block] if minima is None else remaining[block] + minima[group_of[block]]
        ordered[block], shifts = levels.solve(aim, factor.upper[block, block], scales[group_of[block]], None)
        remaining[block.stop :].addmm_(factor.upper[block, block.stop :].T, shifts, alpha=-1)
    result = torch.empty_like(ordered)
    result[factor.order] = ordered
    return replace(solved, levels=result)


def _move_levels(pull: Tensor, solved: SolvedRows, kind: BlockType, hessian: Tensor) -> SolvedRows:
    """Set each level in turn to its optimum with all others fixed; updates `pull`, H (W - W')^T, in place."""
    levels, scales, moved = kind.levels(), kind.scale_values(solved), torch.empty_like(solved.levels)
    group_of = torch.arange(len(pull), device=pull.device) // kind.group
    for start in range(0, len(pull), BLOCK):
        block = slice(start, min(start + BLOCK, len(pull)))
        moved[block], shifts = levels.solve(
            pull[block], hessian[block, block], scales[group_of[block]], solved.levels[block]
        )
        pull.addmm_(hessian[:, block], shifts, alpha=-1)
    return replace(solved, levels=moved)


def _move_scales(pull: Tensor, solved: SolvedRows, kind: BlockType, hessian: Tensor) -> SolvedRows:
    """Set the multiples of each group in turn, then the factors of its super-block, to their optimum."""
    size = kind.stored.block
    multiples = solved.multiples.clone()
    minima = None if solved.minima is None else solved.minima.clone()
    factors = solved.factors.clone()
    per_block = size // kind.group
    for index in range(factors.shape[1]):
        block, groups = slice(index * size, (index + 1) * size), slice(index * per_block, (index + 1) * per_block)
        part = _SuperBlock(
            kind,
            solved.levels[block].float(),
            factors[:, index],
            multiples[groups],
            None if minima is None else minima[groups],
            hessian[block, block],
            pull[block].clone(),
        )
        part.move()
        pull.addmm_(hessian[:, block], part.shifts, alpha=-1)
    return SolvedRows(solved.levels, factors, multiples, minima)


class _SuperBlock:
    """The scales of one super-block in all rows. `move` changes them in place; `shifts`: changes of the weights."""

    def __init__(
        self,
        kind: BlockType,
        levels: Tensor,
        factors: Tensor,
        multiples: Tensor,
        minima: Tensor | None,
        hessian: Tensor,
        pull: Tensor,
    ) -> None:
        self._kind, self._levels, self._hessian, self._pull = kind, levels, hessian, pull
        self._factors, self._multiples, self._minima = factors, multiples, minima
        self.shifts = torch.zeros_like(pull)

    def move(self) -> None:
        for group in range(len(self._multiples)):
            if self._kind.nests_minima:
                self._move_both(group)
            elif self._kind.scales.count > 1:
                self._move_multiple(group)
        unit, size = self._kind.unit, self._kind.group
        self._move_factor(0, self._levels * (self._multiples * unit).repeat_interleave(size, 0))
        if self._minima is not None:
            self._move_factor(1, -self._minima.repeat_interleave(size, 0))

    def _shift(self, rows: slice, shift: Tensor) -> None:
        self.shifts[rows] += shift
        self._pull.addmm_(self._hessian[:, rows], shift, alpha=-1)

    def _move_multiple(self, group: int) -> None:
        rows, multiples = self._rows(group), self._kind.scales
        unit, old = self._factors[0] * self._kind.unit, self._multiples[group]
        direction = self._levels[rows] * unit
        gradient = (direction * self._pull[rows]).sum(0)
        curvature = (direction * (self._hessian[rows, rows] @ direction)).sum(0)
        new = multiples.nearest(old + (gradient / curvature).nan_to_num(0.0, 0.0, 0.0))
        # Of all multiples the one nearest to the optimum has the least error, unless rounding made the curvature
        # negative: then the quotient is no optimum.
        new = torch.where(curvature > 0, new, old)
        self._shift(rows, direction * (new - old))
        self._multiples[group] = new

    def _move_both(self, group: int) -> None:
        rows = self._rows(group)
        assert self._minima is not None and self._kind.minima is not None
        scale, low = self._multiples[group], self._minima[group]
        direction = self._levels[rows] * (self._factors[0] * self._kind.unit)
        ones = -self._factors[1]
        square, pull = self._hessian[rows, rows], self._pull[rows]
        sums = square.sum(1, keepdim=True)
        # The error is quadratic in both changes: curvatures a, b, c, gradients `first` and `second`. Both are
        # moved together, because a change of one can compensate for a change of the other.
        a = (direction * (square @ direction)).sum(0)
        b = (direction * sums).sum(0) * ones
        c = sums.sum() * ones.square()
        first, second = (direction * pull).sum(0), pull.sum(0) * ones
        determinant = (a * c - b.square()).clamp(min=torch.finfo(torch.float32).tiny)
        steps = ((c * first - b * second) / determinant).nan_to_num(0.0, 0.0, 0.0)
        best, best_low, most = scale, low, torch.zeros_like(scale)
        for nearby in (-1, 0, 1):
            # The real optimum rounded in both is seldom the best pair of integers: for each of three multiples, the
            # best minimum is computed.
            new = self._clamped(self._kind.scales, scale + steps + nearby)
            moved = new - scale
            new_low = self._clamped(self._kind.minima, low + ((second - b * moved) / c).nan_to_num(0.0, 0.0, 0.0))
            moved_low = new_low - low
            gain = (
                2 * (first * moved + second * moved_low)
                - a * moved.square()
                - 2 * b * moved * moved_low
                - c * moved_low.square()
            )
            better = gain > most
            best, best_low = torch.where(better, new, best), torch.where(better, new_low, best_low)
            most = torch.where(better, gain, most)
        self._shift(rows, direction * (best - scale) + ones * (best_low - low))
        self._multiples[group], self._minima[group] = best, best_low

    def _move_factor(self, index: int, direction: Tensor) -> None:
        gradient = (direction * self._pull).sum(0)
        curvature = (direction * (self._hessian @ direction)).sum(0)
        old = self._factors[index]
        new = (old + (gradient / curvature).nan_to_num(0.0, 0.0, 0.0)).to(torch.float16).float()
        step = torch.where(torch.isfinite(new) & (curvature > 0), new - old, 0.0)
        self._shift(slice(None), direction * step)
        self._factors[index] = old + step

    def _rows(self, group: int) -> slice:
        return slice(group * self._kind.group, (group + 1) * self._kind.group)

    @staticmethod
    def _clamped(multiples: Multiples, values: Tensor) -> Tensor:
        return multiples.nearest(values)
