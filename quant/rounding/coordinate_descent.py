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
        solved, pull = move_codes(wanted, solved, grid, hessian)
        solved = refit_scales(solved, pull, grid, hessian)
    return solved


def move_codes(weight: Tensor, solved: Quantized, grid: Grid, hessian: Tensor) -> tuple[Quantized, Tensor]:
    """Each code in turn becomes the best one while all others stay; weight fp32 [N, K].

    Also how much the output would gain then by a shift of each weight: H (W - W')^T, fp32 [K, N].
    """
    columns = weight.shape[1]
    scales = solved.scales.float().T.contiguous()
    group_of = torch.arange(columns, device=weight.device) // (columns // len(scales))
    codes = solved.codes.T.contiguous()
    pull = hessian @ (weight - dequantize_codes(solved, grid)).T
    for start in range(0, columns, BLOCK):
        block = slice(start, min(start + BLOCK, columns))
        codes[block], moved = solve_block(
            pull[block], hessian[block, block], scales[group_of[block]], codes[block], grid.half
        )
        pull.addmm_(hessian[:, block], moved, alpha=-1)
    return Quantized(codes.T.contiguous(), solved.scales), pull


def refit_scales(solved: Quantized, pull: Tensor, grid: Grid, hessian: Tensor) -> Quantized:
    """The scales of least error for these codes, rounded to their dtype; a row that would lose by it keeps its own.

    pull fp32 [K, N], as `move_codes` has it for `solved`.
    """
    columns, rows = pull.shape
    groups = solved.scales.shape[1]
    size = columns // groups
    levels = (solved.codes.float() - grid.half).T.contiguous()  # [K, N]
    # A shift d of the scales of a row changes its error by d^T A d - 2 g^T d. A is symmetric: half of it is computed.
    quadratic = torch.empty(groups, groups, rows, device=pull.device)
    for group in range(groups):
        start = group * size
        seen = hessian[start:, start : start + size] @ levels[start : start + size]
        sums = seen.mul_(levels[start:]).view(groups - group, size, rows).sum(1)
        quadratic[group, group:], quadratic[group:, group] = sums, sums
    quadratic = quadratic.permute(2, 0, 1).contiguous()
    gradient = levels.mul_(pull).view(groups, size, rows).sum(1).T
    old = solved.scales.float()
    # Relative to the old scales the numbers are of one size; a group of zeros only has nothing to solve: ridge.
    scaled = quadratic * old.unsqueeze(1) * old.unsqueeze(2)
    diagonal = scaled.diagonal(dim1=1, dim2=2)
    diagonal.add_(1e-6 * diagonal.mean(1, keepdim=True) + torch.finfo(torch.float32).tiny)
    factors, failed = torch.linalg.cholesky_ex(scaled)
    step = torch.cholesky_solve((gradient * old).unsqueeze(2), factors).squeeze(2)
    new = storable(old * (1 + step), grid)
    shift = new - old
    gained = 2 * (gradient * shift).sum(1) - torch.einsum("ng,ngh,nh->n", shift, quadratic, shift)
    better = (failed == 0) & torch.isfinite(new).all(1) & (gained > 0)
    return Quantized(solved.codes, torch.where(better.unsqueeze(1), new, old).to(solved.scales.dtype))
