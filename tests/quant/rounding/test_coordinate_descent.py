"""Test coordinate descent and the refit of scales: each step is optimal and none increases the error."""

import pytest
import torch
from torch import Tensor

from mycli.quant.rounding.columns import descend, move_codes, refit_scales
from mycli.quant.rounding.grid import Grid, Quantized, dequantize_codes, find_scales
from mycli.quant.solvers import gptq, rtn
from mycli.runtime.quantization.scheme import Packing
from tests.support.rounding import output_error, problem


def start(bits: int, columns: int = 160, group: int | None = 32) -> tuple[Tensor, Tensor, Grid, Quantized]:
    weight, hessian = problem(24, columns, seed=bits)
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    grid = Grid(Packing(bits, group), torch.bfloat16)
    return weight, hessian, grid, rtn.solve(weight, grid, hessian).quantized


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_each_code_is_the_best_while_the_others_stay(bits: int) -> None:
    """One sweep equals moving code by code in fp64, however the columns are blocked."""
    weight, hessian, grid, solved = start(bits)
    wide = solved.scales.double().repeat_interleave(32, 1)
    levels = solved.codes.double() - grid.half
    wanted, second = weight.double(), hessian.double()
    for column in range(160):
        lost = wanted - levels * wide
        best = (levels[:, column] + (lost @ second[:, column]) / second[column, column] / wide[:, column]).round()
        levels[:, column] = best.clamp(-grid.half, grid.half - 1)
    moved, pull = move_codes(weight, solved, grid, hessian)
    wanted_pull = second @ (wanted - dequantize_codes(moved, grid).double()).T
    assert torch.allclose(pull.double(), wanted_pull, rtol=1e-3, atol=1e-4 * float(wanted_pull.abs().max()))
    assert (moved.codes.double() - grid.half == levels).double().mean() >= 0.999
    assert torch.equal(moved.scales, solved.scales)
    assert output_error(weight, moved, grid, hessian) < output_error(weight, solved, grid, hessian)


@pytest.mark.parametrize("group", [32, None])
def test_scales_are_those_of_least_squares(group: int | None) -> None:
    weight, hessian, grid, solved = start(3, group=group)
    fitted = refit_scales(solved, hessian @ (weight - dequantize_codes(solved, grid)).T, grid, hessian)
    assert torch.equal(fitted.codes, solved.codes) and fitted.scales.dtype == torch.bfloat16
    root = torch.linalg.cholesky(hessian.double())  # ||(W - W') X|| = ||(W - W') root||
    levels = (solved.codes.double() - grid.half).view(24, solved.scales.shape[1], -1)
    for row in range(24):
        columns = torch.block_diag(*levels[row].unsqueeze(1)).T  # [K, groups]
        best = torch.linalg.lstsq(root.T @ columns, (weight[row].double() @ root).unsqueeze(1)).solution.flatten()
        assert torch.allclose(fitted.scales[row].double(), best, rtol=2**-8, atol=2e-3 * float(best.abs().max()))
    assert output_error(weight, fitted, grid, hessian) < output_error(weight, solved, grid, hessian)


def test_a_row_keeps_scales_whose_rounding_to_16_bits_would_cost_more_than_is_gained() -> None:
    """The scales of groups with nearly the same inputs have the least error only if solved together."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 32, generator=generator)
    inputs = torch.cat((inputs, inputs + 0.1 * torch.randn(400, 32, generator=generator)), 1)
    hessian, grid = inputs.T @ inputs, Grid(Packing(4, 32), torch.bfloat16)
    codes = torch.randint(0, 16, (256, 32), generator=generator, dtype=torch.uint8).repeat(1, 2)
    solved = Quantized(codes, (torch.rand(256, 2, generator=generator) + 0.5).bfloat16())
    weight = dequantize_codes(solved, grid) + 0.03 * torch.randn(256, 64, generator=generator)
    fitted = refit_scales(solved, hessian @ (weight - dequantize_codes(solved, grid)).T, grid, hessian)
    before, after = ((weight - dequantize_codes(each, grid)).double() for each in (solved, fitted))
    errors = [(lost @ hessian.double() * lost).sum(1) for lost in (before, after)]
    assert bool((errors[1] <= 1.0001 * errors[0]).all())
    assert 50 < int((fitted.scales != solved.scales).any(1).sum()) < 150


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_descent_lowers_the_error_of_gptq(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian, grid, _ = start(bits)
    with monkeypatch.context() as patch:
        patch.setattr(gptq, "SWEEPS", 0)
        before = gptq.solve(weight, grid, hessian).quantized
    after = gptq.solve(weight, grid, hessian).quantized
    assert output_error(weight, after, grid, hessian) < 0.99 * output_error(weight, before, grid, hessian)


def test_a_group_of_zeros_and_a_row_of_zeros_stay() -> None:
    weight, hessian, grid, _ = start(4)
    weight[:, :32] = 0
    weight[5] = 0
    solved = Quantized(rtn.solve(weight, grid, hessian).quantized.codes, find_scales(weight, grid))
    after = descend(weight, solved, grid, hessian, 2)
    assert torch.isfinite(after.scales).all() and (after.scales != 0).all()
    assert (dequantize_codes(after, grid)[5] == 0).all()
