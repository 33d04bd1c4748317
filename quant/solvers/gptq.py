"""GPTQ (arXiv 2210.17323): columns are rounded one after another, and each error is made up for by those that follow.

Least ||(W - W') X||^2 for inputs X seen only through the Hessian H = X X^T. Columns are taken by falling diag(H), while
groups and their scales are those of the natural order, fixed beforehand ("static groups"): readers need no index of
columns. Scales are searched with diag(H) as weights and are rounded to their storage dtype before any code is chosen.
Sweeps of coordinate descent from there lower the error of the same problem further.
Knows one matrix at a time; where the inputs came from is not its business.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.quant.rounding.columns import descend, solve_block
from mycli.quant.rounding.grid import BLOCK, Grid, Quantized, find_scales, round_to_grid
from mycli.quant.solvers import SOLVER_WEIGHTS, Solution, SolverSpec

SOLVER = SolverSpec(help="round column by column, compensating each error in later columns", needs_data=True)

SWEEPS = 2  # of coordinate descent afterwards; more gain nothing (docs/quality.md)
# Shares of the mean of diag(H) added to it, until H has a Cholesky factor; then all of them again in double precision.
DAMPING = (0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Factor:
    """`upper` fp32 [K, K]: U with (H + damping mean(diag H) I)^-1 = U^T U, in the order of columns `order` [K]."""

    upper: Tensor
    order: Tensor
    damping: float


def factorize(hessian: Tensor) -> Factor | None:
    """The factor that `solve` works with, for fp32 H [K, K]; None where no damping makes H positive definite."""
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True, stable=True)
    ordered = hessian[order][:, order]
    mean = diagonal.mean()
    for dtype in (torch.float32, torch.float64):
        for damping in DAMPING:
            upper = _inverse_factor(ordered.to(dtype), damping * mean)
            if upper is not None:
                return Factor(upper.float(), order, damping)
    return None


def _inverse_factor(hessian: Tensor, damping: Tensor) -> Tensor | None:
    """U, upper triangular, with (H + damping I)^-1 = U^T U; None where that is not positive definite.

    H = R R^T with R upper triangular is the Cholesky factorization from the last column on, and U = R^-1: no inverse of
    H is ever formed and factored again.
    """
    damped = hessian.flip(0, 1)
    damped.diagonal().add_(damping)
    lower, failed = torch.linalg.cholesky_ex(damped)
    del damped
    if failed:
        return None
    root = lower.flip(0, 1)
    del lower
    identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
    upper = torch.linalg.solve_triangular(root, identity, upper=True)
    return upper if bool(torch.isfinite(upper).all()) else None


def solve(weight: Tensor, grid: Grid, hessian: Tensor | None) -> Solution:
    """Codes and scales for weight [N, K]; hessian fp32 [K, K]. See `find_scales` for the errors raised.

    A column whose input was always zero is rounded to nearest: calibration says nothing about it, other data may. Where
    H cannot be factored the whole matrix is, and the solution says so.
    """
    if hessian is None:
        raise ValueError("gptq needs a Hessian")
    scales = find_scales(weight, grid, hessian.diagonal())
    dead = int((hessian.diagonal() == 0).sum())
    factor = factorize(hessian)
    if factor is None:
        return Solution(Quantized(round_to_grid(weight, scales, grid), scales), dead_columns=dead, fallback=True)
    damped = hessian.clone()
    damped.diagonal().add_(factor.damping * hessian.diagonal().mean())
    rows = max(1, SOLVER_WEIGHTS // weight.shape[1])
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        rounded = Quantized(_round_columns(weight[part].float(), scales[part].float(), factor, grid), scales[part])
        solved = descend(weight[part], rounded, grid, damped, SWEEPS)
        codes[part], scales[part] = solved.codes, solved.scales
    return Solution(Quantized(codes, scales), factor.damping, dead)


def _round_columns(weight: Tensor, scales: Tensor, factor: Factor, grid: Grid) -> Tensor:
    """Codes uint8 [N, K] in natural order for fp32 weight [N, K] and scales [N, groups]."""
    rows, columns = weight.shape
    # Transposed: a column of W is then contiguous, and so is the scale of each row for it.
    remaining = weight.T[factor.order].contiguous()
    group_of = factor.order // (columns // scales.shape[1])
    scales = scales.T.contiguous()
    levels = torch.empty(columns, rows, dtype=torch.uint8, device=weight.device)
    for start in range(0, columns, BLOCK):
        block = slice(start, min(start + BLOCK, columns))
        levels[block], errors = solve_block(
            remaining[block], factor.upper[block, block], scales[group_of[block]], None, grid.half
        )
        remaining[block.stop :].addmm_(factor.upper[block, block.stop :].T, errors, alpha=-1)
    codes = torch.empty_like(levels)
    codes[factor.order] = levels
    return codes.T.contiguous()
