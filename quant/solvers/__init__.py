"""Solvers: one file each, found by its name. They choose codes and scales, never the layout.

A solver is a module with the members of `SolverModule`. It sees one matrix and, if it wants, second moments of its
inputs; it knows nothing of models, files or packing into words.
"""

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from mycli.quant.rounding.grid import Grid, Quantized
from mycli.runtime.errors import UsageError
from mycli.runtime.quantization.scheme import Codes


@dataclass(frozen=True)
class Solution:
    """What a solver chose, and what it met on the way.

    damping: what it added to the diagonal of the Hessian, as a share of its mean; None where it needed no factor.
    dead_columns: inputs that were always zero. fallback: the solver gave up, and the codes are plain rounding.
    error: the `relative_error` of the codes, where the solver knows it anyway.
    """

    quantized: Quantized
    damping: float | None = None
    dead_columns: int = 0
    fallback: bool = False
    error: float | None = None


class SolverModule(Protocol):
    """What a module of this package offers."""

    CODES: Codes  # what its codes stand for: integers, or a table
    NEEDS_HESSIAN: bool  # whether `solve` must be given one; a solver that need not may still use it

    def solve(self, weight: Tensor, grid: Grid, hessian: Tensor | None) -> Solution:
        """Codes and scales for weight [N, K] of any float dtype; hessian fp32 [K, K]: the sum of x x^T.

        Rows do not depend on each other, so linears that share an input may be stacked.
        """
        ...


def names() -> list[str]:
    """The solvers there are, as recipes name them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str) -> SolverModule:
    """The solver of that name. Raises UsageError listing the names otherwise."""
    if name not in names():
        raise UsageError(f"method {name}: no such scheme", code="choose-method", data={"choices": ", ".join(names())})
    return cast(SolverModule, importlib.import_module(f"{__name__}.{name}"))
