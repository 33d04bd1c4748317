"""Rounding to nearest: every weight to the closest level of its group's grid, with the scales that `grid` finds.

Needs no data. With a Hessian at hand its diagonal weights the search for the scales; the rounding itself stays blind to
how errors of different columns add up, which is what the other solvers improve on.
"""

from torch import Tensor

from mycli.quant.rounding.grid import Grid, round_to_nearest
from mycli.quant.solvers import Solution
from mycli.runtime.quantization.scheme import Codes

CODES: Codes = "int"
NEEDS_HESSIAN = False


def solve(weight: Tensor, grid: Grid, hessian: Tensor | None = None) -> Solution:
    """Codes and scales for weight [N, K]; see `find_scales` for the errors raised."""
    importance = None if hessian is None else hessian.diagonal()
    quantized, error = round_to_nearest(weight, grid, importance)
    return Solution(quantized, error=error)
