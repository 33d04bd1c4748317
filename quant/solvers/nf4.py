"""NF4 (QLoRA, arXiv 2305.14314): rounds each weight to the closest of 16 normal quantiles times a scale."""

import torch
from torch import Tensor

from mycli.quant.rounding.grid import Grid, Quantized
from mycli.quant.rounding.plain import SEARCH_WEIGHTS, grouped, require_representable
from mycli.quant.solvers import Solution, SolverSpec
from mycli.runtime.quantization.codes import code_table
from mycli.runtime.quantization.nested_scales import dynamic_table, nest

SOLVER = SolverSpec(
    help="QLoRA's 4-bit NormalFloat for bitsandbytes, without data",
    layout="bitsandbytes",
    bits=(4,),
    group=64,
    row_scales=False,
    stands_alone=True,  # readers of the layout expect the head unquantized
)

# Where the end of the table may lie, as multiples of the largest weight; a finer search gains less than 0.2 %.
_LOW, _HIGH, _COUNT = 0.7, 1.1, 21
_REFITS = 2  # least-squares refinements of the best candidate


def solve(weight: Tensor, grid: Grid, hessian: Tensor | None = None, outputs: Tensor | None = None) -> Solution:
    """See `SolverModule.solve`; the scales are nested. Raises ModelError for weights that are not finite."""
    rows, columns = weight.shape
    groups, table = grid.packing.groups(columns), code_table(grid.packing).to(weight.device)
    step = max(1, SEARCH_WEIGHTS // columns)
    exact = torch.empty(rows, groups, device=weight.device)
    for start in range(0, rows, step):
        part = grouped(weight[start : start + step], groups)
        largest = part.abs().amax(-1)
        require_representable(largest, torch.float32)
        exact[start : start + step] = largest if grid.search == "absmax" else _least_squares(part, largest, table)
    nested = nest(exact.flatten())
    scales = nested.values(dynamic_table()).view(rows, groups).to(weight.device)
    # Codes are chosen for the scales that are left after these were quantized too.
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    for start in range(0, rows, step):
        part = grouped(weight[start : start + step], groups)
        codes[start : start + step] = _nearest(part, scales[start : start + step], table).flatten(1)
    return Solution(Quantized(codes, scales, nested))


def _nearest(part: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Return codes int32 of part [N, G, S] for scales [N, G] of either sign; a scale of zero makes every code equal."""
    middles = (table[:-1] + table[1:]) / 2
    return torch.bucketize((part / scales.unsqueeze(-1)).nan_to_num(0.0), middles, out_int32=True)


def _least_squares(part: Tensor, largest: Tensor, table: Tensor) -> Tensor:
    """Return scales fp32 [N, G] for part [N, G, S], never worse than its largest absolute values [N, G]."""
    best, least = largest, torch.full_like(largest, torch.inf)

    def consider(candidate: Tensor) -> None:
        nonlocal best, least
        error = (table[_nearest(part, candidate, table)] * candidate.unsqueeze(-1)).sub_(part).square_().sum(-1)
        better = error < least
        best, least = torch.where(better, candidate, best), torch.where(better, error, least)

    consider(largest)
    for index in range(_COUNT):
        consider(largest * (_LOW * (_HIGH / _LOW) ** (index / (_COUNT - 1))))
    for _ in range(_REFITS):
        levels = table[_nearest(part, best, table)]
        norms = levels.square().sum(-1)
        consider(torch.where(norms > 0, (levels * part).sum(-1) / norms, best))
    return best
