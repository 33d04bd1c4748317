"""Solvers choose codes and scales for one weight matrix: one file each, with the members of `SolverModule`."""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from mycli.quant.declarations import declared, file_names
from mycli.runtime.quantization.scheme import BITS, OWN_LAYOUT

if TYPE_CHECKING:  # the help reads declarations only
    from torch import Tensor

    from mycli.quant.rounding.grid import Grid, Quantized

DEFAULT = "gptq"
ROUNDING = "rtn"  # follows a transform if the method names no solver
SOLVER_WEIGHTS = 1 << 23  # solved in one call, whole rows, to bound memory: the memory plan counts on it


@dataclass(frozen=True)
class SolverSpec:
    """The declaration of a solver; its values must be literals (see `declarations`)."""

    help: str  # a phrase for `--method`
    layout: str = OWN_LAYOUT  # the checkpoint format that stores its codes
    bits: tuple[int, ...] = BITS
    group: int = 128  # the default number of inputs per scale
    row_scales: bool = True  # one scale per output row is allowed
    needs_data: bool = False
    stands_alone: bool = False  # no transform and no quantized head
    takes_output_moments: bool = False  # else the Hessian is that of the layer alone


@dataclass(frozen=True)
class Solution:
    """The result of a solver."""

    quantized: "Quantized"
    damping: float | None = None  # share of the Hessian's mean diagonal added to it; None without a factorization
    dead_columns: int = 0  # inputs that were always zero
    fallback: bool = False  # the Hessian had no factor, so the codes are plain rounding
    error: float | None = None  # `relative_error` of the codes if the solver computed it


class SolverModule(Protocol):
    SOLVER: SolverSpec

    def solve(
        self, weight: "Tensor", grid: "Grid", hessian: "Tensor | None", outputs: "Tensor | None" = None
    ) -> Solution:
        """Return codes and scales for weight [N, K] of any float dtype; hessian fp32 [K, K] is the sum of x x^T.

        outputs: moments of the gradients of its outputs (`rounding.rows`); None unless the solver takes them.
        """
        # Without `outputs` rows must not depend on each other: linears with the same input are stacked.
        ...


def names() -> list[str]:
    return file_names(__path__)


def spec(name: str) -> SolverSpec:
    """The declaration of a solver, read without importing it."""
    return SolverSpec(**declared(__path__, name, "SOLVER"))


def load(name: str) -> SolverModule:
    return cast(SolverModule, importlib.import_module(f"{__name__}.{name}"))
