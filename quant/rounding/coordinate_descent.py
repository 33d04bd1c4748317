"""Improving codes and scales that a solver chose, under the same Hessian: nothing here can make the error larger.

Coordinate descent (QuantEase, arXiv 2309.01885) lets each code move again, now that all others are known; least squares
then gives each row the scales that are best for its codes. Knows matrices, as the solvers do.
"""

import torch
from torch import Tensor

from mycli.quant.rounding.columns import BLOCK, solve_block
from mycli.quant.rounding.grid import Grid, Quantized, dequantize_codes, storable


def descend(weight: Tensor, solved: Quantized, grid: Grid, hessian: Tensor, sweeps: int) -> Quantized:
    """`sweeps` times: every code once, then every scale. weight [N, K] of any float dtype, hessian fp32 [K, K] with a
    diagonal above zero."""
    wanted = weight.float()
    for _ in range(sweeps):
        solved = refit_scales(wanted, move_codes(wanted, solved, grid, hessian), grid, hessian)
    return solved


def move_codes(weight: Tensor, solved: Quantized, grid: Grid, hessian: Tensor) -> Quantized:
    """Each code in turn becomes the best one while all others stay; weight fp32 [N, K]."""
    columns = weight.shape[1]
    scales = solved.scales.float().T.contiguous()
    group_of = torch.arange(columns, device=weight.device) // (columns // len(scales))
    codes = solved.codes.T.contiguous()
    # How much the output would gain by a shift of each weight: H (W - W')^T, [K, N].
    pull = hessian @ (weight - dequantize_codes(solved, grid)).T
    for start in range(0, columns, BLOCK):
        block = slice(start, min(start + BLOCK, columns))
        codes[block], moved = solve_block(
            pull[block], hessian[block, block], scales[group_of[block]], codes[block], grid.half
        )
        pull.addmm_(hessian[:, block], moved, alpha=-1)
    return Quantized(codes.T.contiguous(), solved.scales)


def refit_scales(weight: Tensor, solved: Quantized, grid: Grid, hessian: Tensor) -> Quantized:
    """The scales of least error for these codes, rounded to their dtype; a row that would lose by it keeps its own.

    weight fp32 [N, K].
    """
    rows, columns = weight.shape
    groups = solved.scales.shape[1]
    levels = (solved.codes.float() - grid.half).T.contiguous()  # [K, N]
    # Error of a row: s^T A s - 2 b^T s + c for its scales s.
    quadratic = torch.empty(rows, groups, groups, device=weight.device)
    for group, part in enumerate(torch.arange(columns, device=weight.device).chunk(groups)):
        seen = hessian[:, part] @ levels[part]
        quadratic[:, group] = seen.mul_(levels).view(groups, -1, rows).sum(1).T
    linear = (hessian @ weight.T).mul_(levels).view(groups, -1, rows).sum(1).T.contiguous()
    old = solved.scales.float()
    # Relative to the old scales the numbers are of one size; a group of zeros only has nothing to solve: ridge.
    scaled = quadratic * old.unsqueeze(1) * old.unsqueeze(2)
    diagonal = scaled.diagonal(dim1=1, dim2=2)
    diagonal.add_(1e-6 * diagonal.mean(1, keepdim=True) + torch.finfo(torch.float32).tiny)
    gradient = (linear - torch.einsum("ngh,nh->ng", quadratic, old)) * old
    factors, failed = torch.linalg.cholesky_ex(scaled)
    step = torch.cholesky_solve(gradient.unsqueeze(2), factors).squeeze(2)
    new = storable(old * (1 + step), grid)

    def error(scales: Tensor) -> Tensor:
        return torch.einsum("ng,ngh,nh->n", scales, quadratic, scales) - 2 * (linear * scales).sum(1)

    better = (failed == 0) & torch.isfinite(new).all(1) & (error(new) < error(old))
    return Quantized(solved.codes, torch.where(better.unsqueeze(1), new, old).to(solved.scales.dtype))
