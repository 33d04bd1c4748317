"""Runs a recipe's solver on linears, with or without calibration data, and describes the result."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mycli.quant import solvers, transforms
from mycli.quant.calibration.hessian import reduced_precision
from mycli.quant.output.model_card import Layer
from mycli.quant.recipe import Recipe
from mycli.quant.rounding.error_compensation import Moments, output_size, refit
from mycli.quant.rounding.grid import (
    Grid,
    Quantized,
    Search,
    dequantize_codes,
    relative_error,
    round_to_grid,
    round_to_nearest,
)
from mycli.quant.rounding.rows import split_rows
from mycli.quant.tuning.block import output_weights, preferred_shifts
from mycli.runtime.errors import ModelError
from mycli.runtime.quantization.scheme import Packing

TOO_FEW_TOKENS = "calibration sent the expert too few tokens"


class SolvedProduct(NamedTuple):
    """The linears of a product by name; `shifts` are their `preferred_shifts`, empty unless blocks are tuned."""

    linears: dict[str, Quantized]
    layers: list[Layer]
    shifts: dict[str, Tensor]


class LinearSolver:
    """A solver, the grid it chooses from, the transform before it, and whether blocks are tuned after it."""

    def __init__(
        self,
        solver: str,
        scale_dtype: torch.dtype,
        search: Search = "mse",
        transform: str | None = None,
        *,
        tunes: bool = False,
        balances: bool = True,
    ) -> None:
        """`balances`: outlying columns are balanced before a block is solved."""
        self.solve_matrix = solvers.load(solver).solve
        self.scale_dtype = scale_dtype
        self._search = search
        self.transform = None if transform is None else transforms.load(transform)
        self.tunes = tunes
        self.balances = balances

    @classmethod
    def of(cls, recipe: Recipe, scale_dtype: torch.dtype, *, balances: bool = True) -> "LinearSolver":
        return cls(recipe.solver, scale_dtype, recipe.scales, recipe.transform, tunes=recipe.tune, balances=balances)

    def grid(self, packing: Packing) -> Grid:
        return Grid(packing, self.scale_dtype, self._search)

    def restore(self, name: str, quantized: Quantized, packing: Packing) -> Tensor:
        """The weight of linear `name` from its codes, rounded to the scales' dtype as every reader rounds it."""
        return dequantize_codes(quantized, self.grid(packing)).to(self.scale_dtype)

    def solve(
        self,
        weights: Mapping[str, Tensor],
        packing: Packing,
        fitted: Moments,
        held_out: Moments,
        outputs: Tensor | None = None,
    ) -> SolvedProduct:
        """Solve weights [N, K] by name, stacked, for the moments of their common input, and of output gradients.

        A linear is rounded instead where plain rounding with the same scales has less of the error that the solver
        minimizes.
        """
        grid = self.grid(packing)
        target, share = refit(torch.cat(list(weights.values())), fitted, held_out)
        hessian = fitted.hessian + held_out.hessian
        try:
            solution = self.solve_matrix(target, grid, hessian, outputs)
        except ModelError as error:
            raise error.with_message(f"{', '.join(weights)}: {error.message}") from error
        bounds = list(accumulate(map(len, weights.values()), initial=0))
        parts = [slice(*bound) for bound in pairwise(bounds)]
        moments = None if outputs is None else output_weights(outputs, len(target))
        worse = None if moments is None else _worse_parts(target, solution.quantized, parts, grid, hessian, moments)
        result = SolvedProduct({}, [], {})
        for index, (name, weight) in enumerate(weights.items()):
            rows = parts[index]
            part, scales = target[rows], solution.quantized.scales[rows]
            solved = Quantized(solution.quantized.codes[rows], scales)
            rounded = Quantized(round_to_grid(part, scales, grid), scales)
            total = _reduced_output_size(part, hessian)
            lost, same_scales = (output_error(part, codes, grid, hessian, total) for codes in (solved, rounded))
            fallback = "Hessian not positive definite" if solution.fallback else None
            is_worse = lost > same_scales if worse is None else worse[index]
            if is_worse:
                fallback = "plain rounding is better"
            result.linears[name] = rounded if fallback else solved
            result.layers.append(
                Layer(
                    name,
                    packing.name,
                    relative_error(weight, result.linears[name], grid),
                    output_error=same_scales if fallback else lost,
                    rounding_output_error=rounding_error(weight, grid, hessian),
                    refit=share,
                    damping=solution.damping,
                    dead_columns=solution.dead_columns,
                    fallback=fallback,
                )
            )
            if self.tunes:
                result.shifts[name] = preferred_shifts(part, result.linears[name], grid, hessian)
        return result

    def solve_without_data(self, name: str, weight: Tensor, packing: Packing) -> tuple[Quantized, Layer]:
        """Solve one weight [N, K]. Raises ModelError, with its name, for weights that cannot be quantized."""
        grid = self.grid(packing)
        try:
            solution = self.solve_matrix(weight, grid, None)
        except ModelError as error:
            raise error.with_message(f"{name}.weight: {error.message}") from error
        lost = relative_error(weight, solution.quantized, grid) if solution.error is None else solution.error
        return solution.quantized, Layer(name, packing.name, lost)

    def round(self, weights: Mapping[str, Tensor], packing: Packing) -> SolvedProduct:
        grid = self.grid(packing)
        result = SolvedProduct({}, [], {})
        for name, weight in weights.items():
            result.linears[name] = round_to_nearest(weight, grid)[0]
            error = relative_error(weight, result.linears[name], grid)
            result.layers.append(Layer(name, packing.name, error, fallback=TOO_FEW_TOKENS))
        return result


def rounding_error(weight: Tensor, grid: Grid, hessian: Tensor) -> float:
    """The `output_error` of rounding to nearest without data."""
    return output_error(weight, round_to_nearest(weight, grid)[0], grid, hessian)


def output_error(
    weight: Tensor, quantized: Quantized, grid: Grid, hessian: Tensor, total: float | None = None
) -> float:
    """Return ||(W - W') X||^2 / ||W X||^2 for inputs X of second moments `hessian` [K, K]; 0 for outputs of zero.

    total: ||W X||^2, if it is known.
    """
    original = weight.float()
    lost = _reduced_output_size(dequantize_codes(quantized, grid).sub_(original), hessian)
    total = _reduced_output_size(original, hessian) if total is None else total
    return lost / total if total > 0 else 0.0


def _worse_parts(
    target: Tensor, solved: Quantized, parts: Sequence[slice], grid: Grid, hessian: Tensor, moments: Tensor
) -> list[bool]:
    """Return for each range of rows whether rounding it to nearest lowers the loss, with all other rows unchanged."""

    def cost(error: Tensor) -> float:  # tr(G E H E^T), the blocks of G being `moments`
        rows = split_rows(error)
        pulled = moments @ rows  # in fp32: errors of rows cancel here
        with reduced_precision(hessian.device):
            outputs = rows @ hessian
        return float((pulled * outputs).sum())

    error = dequantize_codes(solved, grid).sub_(target)
    least, worse = cost(error), []
    for rows in parts:
        scales, before = solved.scales[rows], error[rows].clone()
        rounded = Quantized(round_to_grid(target[rows], scales, grid), scales)
        error[rows] = dequantize_codes(rounded, grid).sub_(target[rows])
        changed = cost(error)
        worse.append(changed < least)
        if worse[-1]:
            least = changed
        else:
            error[rows] = before
    return worse


def _reduced_output_size(weight: Tensor, hessian: Tensor) -> float:
    with reduced_precision(hessian.device):  # rounding moves the ratio by less than 1e-4
        return output_size(weight, hessian)
