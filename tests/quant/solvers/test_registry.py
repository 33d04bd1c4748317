"""The registry of schemes, and rounding to nearest."""

import inspect

import pytest
import torch

from mycli.quant import solvers
from mycli.quant.recipe import Recipe
from mycli.quant.rounding.grid import Grid, Quantized, dequantize_codes, find_scales
from mycli.quant.solvers import rtn
from mycli.runtime.errors import UsageError
from mycli.runtime.quantization.scheme import Packing


def test_file_names_are_the_registry() -> None:
    assert "rtn" in solvers.names()
    for name in solvers.names():
        scheme = solvers.load(name)
        assert solvers.spec(name) == scheme.SOLVER
        assert list(inspect.signature(scheme.solve).parameters)[:3] == ["weight", "grid", "hessian"]


def test_unknown_method_lists_the_known() -> None:
    with pytest.raises(UsageError, match="method 'best' is unknown") as caught:
        Recipe("best")
    assert "rtn" in str(caught.value.data["choices"])


def test_rtn_weights_its_search_with_the_diagonal_of_the_hessian() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 64, generator=generator)
    spread = torch.logspace(-2, 2, 64)[torch.randperm(64, generator=generator)]
    inputs = torch.randn(512, 64, generator=generator) * spread.sqrt()
    hessian = inputs.T @ inputs
    grid = Grid(Packing(3, 32), torch.bfloat16)
    blind, informed = rtn.solve(weight, grid).quantized, rtn.solve(weight, grid, hessian).quantized
    assert torch.equal(informed.scales, find_scales(weight, grid, hessian.diagonal()))

    def output_error(solution: Quantized) -> float:
        return float((inputs @ (dequantize_codes(solution, grid) - weight).T).square().sum())

    assert output_error(informed) < 0.8 * output_error(blind)


def test_rtn_takes_the_dtypes_of_checkpoints() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    grid = Grid(Packing(4, 64), torch.bfloat16)
    low, full = rtn.solve(weight, grid).quantized, rtn.solve(weight.float(), grid).quantized
    assert torch.equal(low.codes, full.codes) and torch.equal(low.scales, full.scales)
