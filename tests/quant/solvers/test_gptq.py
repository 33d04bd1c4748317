"""The GPTQ solver against a slow reference that solves the same problem column by column, and its numerical faults."""

import pytest
import torch
from torch import Tensor

from mycli.quant.rounding.grid import Grid, Quantized, find_scales, round_to_grid
from mycli.quant.solvers import gptq, rtn
from mycli.runtime.quantization.scheme import Packing
from tests.support.rounding import output_error, problem


def reference(weight: Tensor, scales: Tensor, hessian: Tensor, half: int) -> Tensor:
    """Compute codes by the definition, in fp64: round the next column, then solve least squares for the rest."""
    weight, hessian = weight.double(), hessian.double()
    columns = weight.shape[1]
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    wide = scales.double().repeat_interleave(columns // scales.shape[1], 1)
    left = hessian.diagonal().argsort(descending=True, stable=True).tolist()
    target, codes = weight.clone(), torch.empty(weight.shape, dtype=torch.uint8)
    while left:
        column = left.pop(0)
        level = (target[:, column] / wide[:, column]).round().clamp(-half, half - 1)
        codes[:, column] = (level + half).to(torch.uint8)
        error = target[:, column] - level * wide[:, column]
        # The shift d of the remaining columns that best compensates this error: H_RR d = H_Rc error.
        if left:
            shift = torch.linalg.solve(damped[left][:, left], damped[left, column])
            target[:, left] += torch.outer(error, shift)
    return codes


@pytest.mark.parametrize(("bits", "columns", "group"), [(8, 96, 32), (4, 160, None), (3, 192, 64), (2, 160, 32)])
def test_codes_are_those_of_the_reference(
    bits: int, columns: int, group: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The codes are compared before any refinement; the columns span several blocks, the last of them partial."""
    monkeypatch.setattr(gptq, "SWEEPS", 0)
    weight, hessian = problem(48, columns, seed=bits)
    grid = Grid(Packing(bits, group), torch.bfloat16)
    solution = gptq.solve(weight, grid, hessian)
    ours = solution.quantized
    assert torch.equal(ours.scales, find_scales(weight, grid, hessian.diagonal())) and solution.damping == 0.01
    slow = Quantized(reference(weight, ours.scales, hessian, grid.half), ours.scales)
    assert (ours.codes == slow.codes).float().mean() >= 0.999
    errors = [output_error(weight, each, grid, hessian) for each in (ours, slow)]
    assert abs(errors[0] - errors[1]) <= 1e-3 * errors[1]
    assert errors[0] < 0.7 * output_error(weight, rtn.solve(weight, grid, hessian).quantized, grid, hessian)


def test_uncorrelated_inputs_leave_nothing_to_make_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "SWEEPS", 0)
    weight, hessian = problem(16, 64)
    hessian = hessian.diagonal().diag()
    grid = Grid(Packing(4, 32), torch.bfloat16)
    ours, rounded = (scheme.solve(weight, grid, hessian).quantized for scheme in (gptq, rtn))
    assert torch.equal(ours.codes, rounded.codes) and torch.equal(ours.scales, rounded.scales)


def test_rows_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears of one input can thus be solved as one, and a large one in parts."""
    weight, hessian = problem(24, 96)
    grid = Grid(Packing(3, 32), torch.bfloat16)
    whole = gptq.solve(weight, grid, hessian).quantized
    monkeypatch.setattr(gptq, "SOLVER_WEIGHTS", 10 * 96)
    pieces = gptq.solve(weight, grid, hessian).quantized
    assert (whole.codes == pieces.codes).float().mean() > 0.999
    parts = [gptq.solve(part, grid, hessian).quantized for part in weight.split([16, 8])]
    assert (whole.codes == torch.cat([part.codes for part in parts])).float().mean() > 0.999
    assert torch.equal(whole.scales, torch.cat([part.scales for part in parts]))


def test_only_the_relation_of_inputs_counts() -> None:
    weight, hessian = problem(16, 96)
    grid = Grid(Packing(3, 32), torch.bfloat16)
    solved, small = (gptq.solve(weight, grid, moments).quantized for moments in (hessian, hessian * 2**-40))
    assert torch.equal(solved.codes, small.codes) and torch.equal(solved.scales, small.scales)


@pytest.mark.parametrize("fault", ["E2-dead-columns"])
def test_dead_columns_keep_their_rounded_values(fault: str) -> None:
    weight, hessian = problem(16, 96)
    dead = torch.tensor([0, 33, 95])
    hessian[dead] = 0
    hessian[:, dead] = 0
    grid = Grid(Packing(4, 32), torch.bfloat16)
    solution = gptq.solve(weight, grid, hessian)
    assert solution.dead_columns == 3 and not solution.fallback
    rounded = round_to_grid(weight, solution.quantized.scales, grid)
    assert torch.equal(solution.quantized.codes[:, dead], rounded[:, dead])
    assert (solution.quantized.codes[:, dead] != grid.half).any()


@pytest.mark.parametrize("fault", ["E1-rank-deficient"])
def test_few_tokens_are_no_obstacle(fault: str) -> None:
    weight, _ = problem(16, 96)
    inputs = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    solution = gptq.solve(weight, Grid(Packing(4, 32), torch.bfloat16), inputs.T @ inputs)
    assert not solution.fallback and solution.damping == 0.01


@pytest.mark.parametrize("fault", ["E1-not-positive-definite"])
def test_damping_grows_until_the_hessian_can_be_factored(fault: str) -> None:
    weight, hessian = problem(16, 96)
    lowest = torch.linalg.eigvalsh(hessian)[0]
    hessian -= (lowest + 0.05 * hessian.diagonal().mean()) * torch.eye(96)
    assert (hessian.diagonal() > 0).any()
    solution = gptq.solve(weight, Grid(Packing(4, 32), torch.bfloat16), hessian)
    assert not solution.fallback and solution.damping is not None and solution.damping > 0.05


@pytest.mark.parametrize("fault", ["E1-hopeless"])
def test_plain_rounding_is_the_last_resort_and_is_said(fault: str) -> None:
    weight, hessian = problem(16, 96)
    grid = Grid(Packing(4, 32), torch.bfloat16)
    indefinite = hessian.clone()
    indefinite[3, 5] = indefinite[5, 3] = 1e12
    solution = gptq.solve(weight, grid, indefinite)
    assert solution.fallback and solution.damping is None
    rounded = rtn.solve(weight, grid, indefinite).quantized
    assert torch.equal(solution.quantized.codes, rounded.codes)


@pytest.mark.parametrize("columns", [1, 16, 17, 75])
def test_a_wide_factor_is_that_of_a_narrow_one(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randn(3 * columns, columns, generator=torch.Generator().manual_seed(columns))
    hessian = inputs.T @ inputs
    narrow = gptq.factorize(hessian)
    monkeypatch.setattr(gptq, "_WIDE", 16)
    wide = gptq.factorize(hessian)
    assert narrow is not None and wide is not None and wide.order.equal(narrow.order)
    assert torch.allclose(wide.upper, narrow.upper, rtol=1e-4, atol=1e-7)
    assert not wide.upper.tril(-1).any()
