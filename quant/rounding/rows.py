"""Rows solved in turn: errors of different outputs add up or cancel in the loss of the whole model."""

# With G the second moments of the loss's gradients by the outputs, and H those of the inputs, a change E of a weight
# costs about tr(G E H E^T) / 2 (K-FAC, arXiv 1503.05671; for rounding YAQA, arXiv 2505.22988). Solved column by column
# this needs a loop over single weights. Solved row by row, each row is a problem in H alone, whose target contains the
# errors of the rows before it, and rows at the same place of all blocks of G are solved in one call.

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.quant.rounding.columns import descend
from mycli.quant.rounding.grid import Grid, Quantized, dequantize_codes
from mycli.runtime.models.part_spec import OutputRows

# Rows of a block of G; what couples other rows is left out, which bounds memory and time (docs/quality.md).
BLOCK_ROWS = 256
ROW_DAMPING = 0.1  # share of the mean of diag(G) added to it: with 0.01 pico lost 2 % more


def split_rows(values: Tensor, fill: float = 0.0) -> Tensor:
    """Return [N, ...] as [blocks, S, ...] for S = BLOCK_ROWS, with rows of `fill` at the end."""
    missing = -len(values) % BLOCK_ROWS
    padding = values.new_full((missing, *values.shape[1:]), fill)
    return torch.cat((values, padding)).view(-1, BLOCK_ROWS, *values.shape[1:])


def row_scale(source: OutputRows, scale: Tensor) -> Tensor:
    """Return what divides the rows from `source.start` on if the inputs that they produce are multiplied by `scale`."""
    rows = scale.view(source.groups, source.copies, source.width)[:, 0]
    stride, last = source.stride or source.width, source.groups - 1
    spaced = torch.ones(last * stride + source.width, dtype=scale.dtype, device=scale.device)
    spaced.as_strided(rows.shape, (stride, 1)).copy_(rows)
    return spaced


def rescaled(moments: Tensor, source: OutputRows, scale: Tensor) -> Tensor:
    """Return the moments [blocks, S, S] of gradients by rows after these were divided by `row_scale`."""
    factors = moments.new_ones(moments.shape[:2]).flatten()
    divisors = row_scale(source, scale)
    factors[source.start : source.start + len(divisors)] = divisors.to(factors)
    factors = factors.view(moments.shape[:2])
    return moments * factors.unsqueeze(1) * factors.unsqueeze(2)


@dataclass(frozen=True)
class RowBlocks:
    """The blocks of G, damped and of mean diagonal 1."""

    # `hessian` and `upper` fp32 [blocks, S, S] in order `order` [blocks, S]; the inverse of a block is U^T U for its
    # `upper` U. Rows from `count` on are padding.
    hessian: Tensor
    upper: Tensor
    order: Tensor
    count: int

    @classmethod
    def of(cls, moments: Tensor, count: int) -> "RowBlocks | None":
        """Return the blocks of `moments` fp32 [blocks, S, S]; None if they have no factor, as without gradients."""
        diagonal = moments.diagonal(dim1=1, dim2=2)
        mean = diagonal.sum() / count
        if not bool(torch.isfinite(mean) & (mean > 0)):
            return None
        rows = torch.arange(diagonal.numel(), device=moments.device).view_as(diagonal)
        # Padding comes last in any order: its rows are independent of all others.
        places = torch.where(rows < count, diagonal, -1.0).argsort(dim=1, descending=True, stable=True)
        hessian = moments.gather(1, places.unsqueeze(2).expand_as(moments))
        hessian = hessian.gather(2, places.unsqueeze(1).expand_as(moments)) / mean
        hessian.diagonal(dim1=1, dim2=2).add_(ROW_DAMPING)
        # As in `gptq.factorize`: U is the inverse of the upper triangular R with R R^T = G.
        lower, failed = torch.linalg.cholesky_ex(hessian.flip(1, 2))
        if bool(failed.any()):
            return None
        identity = torch.eye(BLOCK_ROWS, device=moments.device)
        upper = torch.linalg.solve_triangular(lower.flip(1, 2), identity.expand_as(hessian), upper=True)
        return cls(hessian, upper, rows.gather(1, places), count)

    @property
    def places(self) -> int:
        """The number of places of a block to solve: padding, which comes last, has all others."""
        return min(self.count, BLOCK_ROWS)

    def gather(self, values: Tensor, fill: float = 0.0) -> Tensor:
        # Rows of [N, ...] as [S, blocks, ...] in the order in which they are solved, each place contiguous.
        return split_rows(values, fill).flatten(0, 1)[self.order.T]

    def scatter(self, values: Tensor) -> Tensor:
        result = torch.empty_like(values).flatten(0, 1)
        result[self.order.T.flatten()] = values.flatten(0, 1)
        return result[: self.count]


def round_rows(
    weight: Tensor, scales: Tensor, grid: Grid, blocks: RowBlocks, round_columns: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return codes of fp32 weight [N, K]: each row compensates the errors of those before it.

    round_columns: returns codes for rows [n, K] and their scales.
    """
    left, ordered = blocks.gather(weight), blocks.gather(scales, 1.0)
    codes = torch.empty(left.shape, dtype=torch.uint8, device=weight.device)
    for place, rows in enumerate(left[: blocks.places]):
        codes[place] = round_columns(rows, ordered[place].float())
        error = rows - dequantize_codes(Quantized(codes[place], ordered[place]), grid)
        error /= blocks.upper[:, place, place, None]
        later = blocks.upper[:, place, place + 1 :].T
        left[place + 1 :] -= later.unsqueeze(2) * error
    return blocks.scatter(codes)


def descend_rows(
    weight: Tensor, solved: Quantized, grid: Grid, hessian: Tensor, blocks: RowBlocks, sweeps: int
) -> Quantized:
    """Move the codes, then the scales of each row in turn, `sweeps` times; tr(G E H E^T) never grows."""
    target, codes, scales = blocks.gather(weight), blocks.gather(solved.codes, grid.half), solved.scales
    ordered = blocks.gather(scales, 1.0)
    error = blocks.gather(weight - dequantize_codes(solved, grid))
    coupling = (blocks.hessian / blocks.hessian.diagonal(dim1=1, dim2=2).unsqueeze(2)).transpose(0, 1).contiguous()
    for _ in range(sweeps):
        for place, rows in enumerate(target[: blocks.places]):
            # The cost of one row with all others fixed is that of a target moved by their errors.
            others = torch.einsum("bs,sbk->bk", coupling[place], error).sub_(error[place]).add_(rows)
            moved = descend(others, Quantized(codes[place], ordered[place]), grid, hessian, 1)
            codes[place], ordered[place] = moved.codes, moved.scales
            error[place] = rows - dequantize_codes(moved, grid)
    return Quantized(blocks.scatter(codes), blocks.scatter(ordered))
