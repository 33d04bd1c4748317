"""Columns solved in turn, each waiting for those before it, and coordinate descent (QuantEase, arXiv 2309.01885)."""

import torch
from torch import Tensor

from mycli.quant.rounding import plain
from mycli.quant.rounding.grid import BLOCK, Grid, Quantized, dequantize_codes
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.rounding import native_columns


def solve_block(
    residual: Tensor, matrix: Tensor, scales: Tensor, codes: Tensor | None, half: int
) -> tuple[Tensor, Tensor]:
    """Return codes uint8 and shifts fp32 [C, N] of C <= BLOCK columns; residual, scales [C, N], matrix [C, C]."""
    # For column i in turn, r is `residual` less matrix[j, i] * shift[j] of all j < i; a level is a code less `half`.
    # `codes` None (GPTQ): take the level nearest to r; the shift is (r - level * scale) / matrix[i, i].
    # Else (coordinate descent): the level moves by r / matrix[i, i]; the shift is the weight's movement.
    # The caller subtracts the shifts' effect from later columns. Rows are independent: one launch solves all.
    if residual.is_cuda:
        from mycli.quant.rounding.columns_triton import launch  # triton is not installed everywhere

        return launch(residual, matrix, scales, codes, half)
    solved = native_columns(residual, matrix, scales, codes, half)
    return plain.solve_columns(residual, matrix, scales, codes, half) if isinstance(solved, Declined) else solved


def descend(weight: Tensor, solved: Quantized, grid: Grid, hessian: Tensor, sweeps: int) -> Quantized:
    """Move every code once, then every scale, `sweeps` times; the error under `hessian` fp32 [K, K] never grows."""
    target = weight.float()
    for _ in range(sweeps):
        solved, pull = move_codes(target, solved, grid, hessian)
        solved = refit_scales(solved, pull, grid, hessian)
    return solved


def move_codes(weight: Tensor, solved: Quantized, grid: Grid, hessian: Tensor) -> tuple[Quantized, Tensor]:
    """Set each code in turn to the best one while all others stay; also returns H (W - W')^T, fp32 [K, N]."""
    columns = weight.shape[1]
    scales = solved.scales.float().T.contiguous()
    group_of = torch.arange(columns, device=weight.device) // (columns // len(scales))
    codes = solved.codes.T.contiguous()
    pull = hessian @ (weight - dequantize_codes(solved, grid)).T
    for start in range(0, columns, BLOCK):
        block = slice(start, min(start + BLOCK, columns))
        codes[block], shifts = solve_block(
            pull[block], hessian[block, block], scales[group_of[block]], codes[block], grid.half
        )
        pull.addmm_(hessian[:, block], shifts, alpha=-1)
    return Quantized(codes.T.contiguous(), solved.scales), pull


def refit_scales(solved: Quantized, pull: Tensor, grid: Grid, hessian: Tensor) -> Quantized:
    """Return the codes with scales of least error; a row that would lose keeps its own; pull: from `move_codes`."""
    columns, rows = pull.shape
    groups = solved.scales.shape[1]
    size = columns // groups
    levels = (solved.codes.float() - grid.half).T.contiguous()  # [K, N]
    # A shift d of the scales of a row changes its error by d^T A d - 2 g^T d. A is symmetric: half of it is computed.
    quadratic = torch.empty(groups, groups, rows, device=pull.device)
    for group in range(groups):
        start = group * size
        product = hessian[start:, start : start + size] @ levels[start : start + size]
        sums = product.mul_(levels[start:]).view(groups - group, size, rows).sum(1)
        quadratic[group, group:], quadratic[group:, group] = sums, sums
    quadratic = quadratic.permute(2, 0, 1).contiguous()
    gradient = levels.mul_(pull).view(groups, size, rows).sum(1).T
    old = solved.scales.float()
    # Relative to the old scales all numbers have similar size. The ridge keeps groups of zeros
    # solvable; a row of zeros is not, and keeps its scales.
    scaled = quadratic * old.unsqueeze(1) * old.unsqueeze(2)
    diagonal = scaled.diagonal(dim1=1, dim2=2)
    diagonal.add_(1e-6 * diagonal.mean(1, keepdim=True))
    factors, failed = torch.linalg.cholesky_ex(scaled)
    step = torch.cholesky_solve((gradient * old).unsqueeze(2), factors).squeeze(2)
    new = grid.storable(old * (1 + step))
    shift = new - old
    gain = 2 * (gradient * shift).sum(1) - torch.einsum("ng,ngh,nh->n", shift, quadratic, shift)
    better = (failed == 0) & torch.isfinite(new).all(1) & (gain > 0)
    return Quantized(solved.codes, torch.where(better.unsqueeze(1), new, old).to(solved.scales.dtype))
