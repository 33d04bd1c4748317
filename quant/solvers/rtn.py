"""Round to nearest: every weight to the closest level of its group's grid, with the scales that `grid` finds."""

from torch import Tensor

from mycli.quant.rounding.grid import Grid, round_to_nearest
from mycli.quant.solvers import Solution, SolverSpec

SOLVER = SolverSpec(help="round to nearest, without data")


def solve(weight: Tensor, grid: Grid, hessian: Tensor | None = None, outputs: Tensor | None = None) -> Solution:
    """See `SolverModule.solve`; the diagonal of a Hessian weights the search for scales. Raises as `find_scales`."""
    importance = None if hessian is None else hessian.diagonal()
    quantized, error = round_to_nearest(weight, grid, importance)
    return Solution(quantized, error=error)
