"""GPTQ (arXiv 2210.17323): rounds column by column and compensates each error in the columns that follow."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mycli.quant.rounding.columns import descend, solve_block
from mycli.quant.rounding.grid import BLOCK, Grid, Quantized, find_scales, round_to_grid
from mycli.quant.rounding.rows import RowBlocks, descend_rows, round_rows
from mycli.quant.solvers import SOLVER_WEIGHTS, Solution, SolverSpec

SOLVER = SolverSpec(
    help="round column by column, compensating each error in later columns", needs_data=True, takes_output_moments=True
)

SWEEPS = 2  # of coordinate descent; more gain nothing (docs/quality.md)
_WIDE = 2048  # columns
# Shares of the mean of diag(H) added to it until H has a Cholesky factor; then all again in double precision.
DAMPING = (0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Factor:
    """`upper` fp32 [K, K]: U with (H + damping mean(diag H) I)^-1 = U^T U, in the order of columns `order` [K]."""

    upper: Tensor
    order: Tensor
    damping: float


def factorize(hessian: Tensor, order: Tensor | None = None) -> Factor | None:
    """Return the factor of fp32 H [K, K], by default in order of its diagonal; None if H is not positive definite."""
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True, stable=True) if order is None else order
    ordered = hessian[order][:, order]
    mean = diagonal.mean()
    for dtype in (torch.float32, torch.float64):
        for damping in DAMPING:
            upper = _inverse_factor(ordered.to(dtype), damping * mean)
            if upper is not None:
                return Factor(upper.float(), order, damping)
    return None


def _inverse_factor(hessian: Tensor, damping: Tensor) -> Tensor | None:
    """Return U, upper triangular, with (H + damping I)^-1 = U^T U; None if that is not positive definite."""
    # H = R R^T with R upper triangular is the Cholesky factorization from the last column on, and U = R^-1: the inverse
    # of H is never formed and factored again.
    damped = hessian.flip(0, 1)
    damped.diagonal().add_(damping)
    lower, failed = torch.linalg.cholesky_ex(damped)
    del damped
    if failed:
        return None
    root = lower.flip(0, 1)
    del lower
    upper = _inverse_of_upper(root)
    return upper if bool(torch.isfinite(upper).all()) else None


def _inverse_of_upper(root: Tensor) -> Tensor:
    """Return the inverse of an upper triangular matrix [K, K]."""
    # Solving for the identity multiplies by its zeros too. Wide matrices are inverted by halves; narrow ones keep the
    # bits of torch.
    size = len(root)
    if size < _WIDE:
        identity = torch.eye(size, dtype=root.dtype, device=root.device)
        narrow: Tensor = torch.linalg.solve_triangular(root, identity, upper=True)
        return narrow
    half = size // 2
    inverse = torch.zeros_like(root)
    first, last = _inverse_of_upper(root[:half, :half]), _inverse_of_upper(root[half:, half:])
    inverse[:half, :half], inverse[half:, half:] = first, last
    inverse[:half, half:] = (first @ root[:half, half:] @ last).neg_()
    return inverse


def solve(weight: Tensor, grid: Grid, hessian: Tensor | None, outputs: Tensor | None = None) -> Solution:
    """See `SolverModule.solve`; falls back to plain rounding if H has no factor. Raises as `find_scales`."""
    # Minimizes ||(W - W') X||^2 for H = X X^T. A column whose input was always zero is rounded to nearest: other data
    # may use it.
    if hessian is None:
        raise ValueError("gptq needs a Hessian")
    # Stored scales are fixed before any code is chosen, so no rounding follows the compensation.
    scales = find_scales(weight, grid, hessian.diagonal())
    dead = int((hessian.diagonal() == 0).sum())
    factor = factorize(hessian)
    if factor is None:
        return Solution(Quantized(round_to_grid(weight, scales, grid), scales), dead_columns=dead, fallback=True)
    damped = hessian.clone()
    damped.diagonal().add_(factor.damping * hessian.diagonal().mean())
    blocks = None if outputs is None else RowBlocks.of(outputs, len(weight))
    if blocks is not None:
        target = weight.float()
        first = round_rows(target, scales, grid, blocks, partial(_round_columns, factor=factor, grid=grid))
        both = descend_rows(target, Quantized(first, scales), grid, damped, blocks, SWEEPS)
        return Solution(both, factor.damping, dead)
    rows = max(1, SOLVER_WEIGHTS // weight.shape[1])
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        rounded = Quantized(_round_columns(weight[part].float(), scales[part].float(), factor, grid), scales[part])
        solved = descend(weight[part], rounded, grid, damped, SWEEPS)
        codes[part], scales[part] = solved.codes, solved.scales
    return Solution(Quantized(codes, scales), factor.damping, dead)


def _round_columns(weight: Tensor, scales: Tensor, factor: Factor, grid: Grid) -> Tensor:
    rows, columns = weight.shape
    # Columns in order of falling diag(H), groups in natural order ("static groups"): readers need no index of columns.
    # Transposed, so that a column of W is contiguous, and so are the scales of all rows for it.
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
