"""Rows solved in turn against their definition in fp64, and the cost that they lower."""

from functools import partial

import pytest
import torch
from torch import Tensor

from mycli.quant.rounding import rows
from mycli.quant.rounding.grid import Grid, Quantized, dequantize_codes, find_scales, round_to_grid
from mycli.quant.rounding.rows import (
    BLOCK_ROWS,
    ROW_DAMPING,
    RowBlocks,
    descend_rows,
    rescaled,
    round_rows,
    row_scale,
    split_rows,
)
from mycli.quant.solvers import gptq
from mycli.runtime.models.part_spec import OutputRows
from mycli.runtime.quantization.scheme import Packing
from tests.support.rounding import problem

COUNT = BLOCK_ROWS + 44  # two blocks, the second padded


def moments(count: int = COUNT, seed: int = 1) -> Tensor:
    """Return [blocks, BLOCK_ROWS, BLOCK_ROWS] of correlated gradients of very different size."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-1, 0.5, count)[torch.randperm(count, generator=generator)]
    gradients = torch.randn(2 * count, 16, generator=generator) @ torch.randn(16, count, generator=generator)
    gradients = (gradients + torch.randn(2 * count, count, generator=generator)) * spread
    parts = split_rows(gradients.T)
    return parts @ parts.transpose(1, 2)


def whole(blocks: Tensor, count: int = COUNT) -> Tensor:
    """Return G [count, count] in fp64, damped, of mean diagonal 1 before."""
    matrix = torch.block_diag(*blocks.double())[:count, :count]
    matrix /= matrix.diagonal().mean()
    return matrix + ROW_DAMPING * torch.eye(count, dtype=torch.float64)


def cost(weight: Tensor, solved: Quantized, grid: Grid, hessian: Tensor, outputs: Tensor) -> float:
    lost = dequantize_codes(solved, grid).double() - weight.double()
    return float((outputs @ lost @ hessian.double() * lost).sum())


def test_rows_compensate_the_errors_of_those_before_them() -> None:
    """With plain rounding of each row, later rows take the shift that least squares gives for every error."""
    weight, _ = problem(COUNT, 32)
    grid, outputs = Grid(Packing(3, 32), torch.bfloat16), moments()
    blocks = RowBlocks.of(outputs, COUNT)
    assert blocks is not None
    scales = find_scales(weight, grid)
    codes = round_rows(weight, scales, grid, blocks, partial(round_to_grid, grid=grid))
    target, matrix = weight.double().clone(), whole(outputs)
    for order in blocks.order:
        left = [row for row in order.tolist() if row < COUNT]
        while left:
            row = left.pop(0)
            level = (target[row] / scales[row].double()).round().clamp(-grid.half, grid.half - 1)
            same = codes[row].double() - grid.half == level
            assert same.double().mean() > 0.9, "a value beside a tie may fall to either side"
            error = target[row] - (codes[row].double() - grid.half) * scales[row].double()
            if left:
                target[left] += torch.outer(torch.linalg.solve(matrix[left][:, left], matrix[left, row]), error)


def test_outputs_that_are_not_correlated_change_nothing() -> None:
    weight, hessian = problem(40, 96)
    grid = Grid(Packing(3, 32), torch.bfloat16)
    outputs = split_rows(torch.ones(40)).diag_embed()
    alone, solved = (gptq.solve(weight, grid, hessian, given).quantized for given in (None, outputs))
    assert (alone.codes == solved.codes).float().mean() > 0.999
    assert (alone.scales == solved.scales).float().mean() > 0.99


@pytest.mark.parametrize("bits", [4, 2])
def test_the_cost_of_the_model_falls(bits: int) -> None:
    weight, hessian = problem(COUNT, 64, seed=bits)
    grid, outputs = Grid(Packing(bits, 32), torch.bfloat16), moments()
    alone, solved = (gptq.solve(weight, grid, hessian, given).quantized for given in (None, outputs))
    assert cost(weight, solved, grid, hessian, whole(outputs)) < 0.8 * cost(
        weight, alone, grid, hessian, whole(outputs)
    )


def test_every_sweep_lowers_the_cost() -> None:
    weight, hessian = problem(COUNT, 64)
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    grid, outputs = Grid(Packing(3, 32), torch.bfloat16), moments()
    blocks = RowBlocks.of(outputs, COUNT)
    assert blocks is not None
    scales = find_scales(weight, grid)
    solved = Quantized(round_to_grid(weight, scales, grid), scales)
    costs = [cost(weight, solved, grid, hessian, whole(outputs))]
    for _ in range(3):
        solved = descend_rows(weight, solved, grid, hessian, blocks, 1)
        costs.append(cost(weight, solved, grid, hessian, whole(outputs)))
    assert costs == sorted(costs, reverse=True) and costs[1] < 0.8 * costs[0]


def test_blocks_are_independent_and_in_order_of_importance() -> None:
    outputs = moments()
    blocks = RowBlocks.of(outputs, COUNT)
    assert blocks is not None
    diagonal = outputs.diagonal(dim1=1, dim2=2).flatten()[blocks.order]
    assert bool((diagonal[:, 1:] <= diagonal[:, :-1]).all())
    assert torch.equal(blocks.order.flatten().sort().values, torch.arange(2 * BLOCK_ROWS))
    assert bool((blocks.order[1, COUNT - BLOCK_ROWS :] >= COUNT).all()), "padding comes last"
    identity = blocks.upper.transpose(1, 2) @ blocks.upper @ blocks.hessian
    assert torch.allclose(identity, torch.eye(BLOCK_ROWS).expand_as(identity), atol=1e-3)
    small = RowBlocks.of(outputs * 2**-20, COUNT)
    assert small is not None and torch.equal(small.upper, blocks.upper), "only their relation counts"
    values = torch.arange(COUNT * 2).view(COUNT, 2)
    assert torch.equal(blocks.scatter(blocks.gather(values)), values)


@pytest.mark.parametrize("value", [0.0, float("nan")], ids=["none", "nan"])
def test_without_gradients_the_layer_decides(value: float) -> None:
    outputs = torch.full((1, BLOCK_ROWS, BLOCK_ROWS), value)
    assert RowBlocks.of(outputs, 40) is None
    weight, hessian = problem(40, 64)
    grid = Grid(Packing(4, 32), torch.bfloat16)
    alone, solved = (gptq.solve(weight, grid, hessian, given).quantized for given in (None, outputs))
    assert torch.equal(alone.codes, solved.codes) and torch.equal(alone.scales, solved.scales)


def test_gradients_of_divided_rows_are_multiplied() -> None:
    source = OutputRows("qkv", start=2, groups=2, copies=2, width=3, stride=4)
    scale = torch.tensor([2.0, 4.0, 8.0]).repeat(4)
    divisors = row_scale(source, scale)
    assert divisors.tolist() == [2, 4, 8, 1, 2, 4, 8]
    gradients = torch.randn(BLOCK_ROWS + 8, 20, generator=torch.Generator().manual_seed(0))
    factors = torch.ones(len(gradients))
    factors[2:9] = divisors
    before, after = (
        split_rows(part) @ split_rows(part).transpose(1, 2) for part in (gradients, gradients * factors[:, None])
    )
    assert torch.allclose(rescaled(before, source, scale), after, rtol=1e-5, atol=1e-4)
    assert before.shape[1] == rows.BLOCK_ROWS


def test_rows_in_sequence_that_nothing_copies_have_a_scale_each() -> None:
    source = OutputRows("up", start=0, groups=2, copies=1, width=2)
    assert row_scale(source, torch.tensor([2.0, 4.0, 8.0, 3.0])).tolist() == [2, 4, 8, 3]


@pytest.mark.parametrize("count", [40, BLOCK_ROWS + 8])
def test_padding_takes_no_time(count: int) -> None:
    weight, _ = problem(count, 32)
    grid = Grid(Packing(3, 32), torch.bfloat16)
    blocks = RowBlocks.of(moments(count), count)
    assert blocks is not None
    scales = find_scales(weight, grid)
    steps = []

    def counted(rows: Tensor, scales: Tensor) -> Tensor:
        steps.append(len(rows))
        return round_to_grid(rows, scales, grid)

    round_rows(weight, scales, grid, blocks, counted)
    assert len(steps) == min(count, BLOCK_ROWS), "one step for each row of a block that is not padding in all blocks"
