"""Check that every type is written as all readers decode it, and solving loses less than rounding."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mycli.quant.ggml import types
from mycli.quant.ggml.block_type import Multiples
from mycli.quant.ggml.blocks import encode_rows
from mycli.quant.ggml.search import _error, _least_squares, _symmetric, search_scales
from mycli.quant.ggml.solve import _SuperBlock, factor_for, round_blocks, solve
from mycli.runtime.checkpoint.gguf.blocks import dequantize_blocks
from mycli.runtime.errors import ModelError

ROWS, COLUMNS = 24, 256


def _problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=generator) * 0.02
    mixing = torch.eye(COLUMNS) + torch.randn(COLUMNS, COLUMNS, generator=generator) / 16
    scales = torch.randn(COLUMNS, generator=generator).exp()
    inputs = torch.randn(1024, COLUMNS, generator=generator) @ mixing * scales
    return weight, inputs.T @ inputs


def _lost(weight: Tensor, blocks: Tensor, name: str, hessian: Tensor) -> float:
    difference = dequantize_blocks(blocks, name) - weight
    return float(((difference @ hessian) * difference).sum())


@pytest.mark.parametrize("name", types.names())
def test_solved_blocks_are_read_alike_and_lose_less(name: str) -> None:
    weight, hessian = _problem()
    kind = types.load(name)
    rounded, searched = round_blocks(weight, kind), solve(weight, kind, hessian, None)
    solved = solve(weight, kind, hessian, factor_for(hessian, kind))
    assert solved.shape == (ROWS, COLUMNS // kind.stored.block * kind.stored.nbytes)
    theirs = gguf.dequantize(solved.numpy(), gguf.GGMLQuantizationType[name])
    assert np.array_equal(theirs, dequantize_blocks(solved, name).numpy())
    losses = [_lost(weight, blocks, name, hessian) for blocks in (solved, searched, rounded)]
    assert losses[0] < 0.85 * losses[1] and losses[1] < losses[2]
    # Rounding without data is at least as good as ggml's own, which has no importance matrix here either.
    if name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        theirs = gguf.dequantize(
            gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[name]), gguf.GGMLQuantizationType[name]
        )
        ours = dequantize_blocks(rounded, name).numpy()
        assert np.square(ours - weight.numpy()).sum() <= 1.001 * np.square(theirs - weight.numpy()).sum()


@pytest.mark.parametrize("name", types.names())
def test_blocks_decode_to_the_weights_that_were_chosen(name: str) -> None:
    weight, hessian = _problem()
    kind = types.load(name)
    chosen = search_scales(weight, kind, hessian.diagonal())
    assert dequantize_blocks(encode_rows(chosen, kind), name).equal(kind.weights(chosen).T)


@given(first=st.integers(-32, 32), count=st.integers(1, 64), step=st.integers(1, 4), seed=st.integers(0, 99))
def test_multiples_are_the_nearest_ones(first: int, count: int, step: int, seed: int) -> None:
    multiples, generator = Multiples(first, count, step), torch.Generator().manual_seed(seed)
    every = torch.tensor([first + step * index for index in range(count)], dtype=torch.float32)
    values = (torch.rand(20, generator=generator) - 0.25) * 2 * multiples.last + first
    nearest = multiples.nearest(values)
    assert torch.isin(nearest, every).all() and multiples.last == every[-1]
    assert ((nearest - values).abs() <= (every - values[:, None]).abs().amin(1) + 1e-4).all()
    assert multiples.nearest(torch.tensor([torch.nan, -torch.inf, torch.inf])).tolist() == [first, first, every[-1]]


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q6_K", "IQ4_XS", "IQ3_S", "IQ2_XXS"])
def test_zeros_stay_zeros_or_nearly(name: str) -> None:
    weight, hessian = _problem()
    weight[3] = 0
    hessian[:, 5] = hessian[5] = 0
    kind = types.load(name)
    values = dequantize_blocks(solve(weight, kind, hessian, factor_for(hessian, kind)), name)
    assert torch.isfinite(values).all() and values[3].abs().max() < 1e-6


def test_columns_without_inputs_in_calibration_are_rounded_as_well_as_others() -> None:
    """Other texts may use them."""
    weight, _ = _problem()
    kind, half = types.load("Q4_0"), COLUMNS // 2
    errors = []
    for share in (0.0, 1.0):
        chosen = search_scales(weight, kind, torch.cat([torch.full((half,), share), torch.ones(half)]))
        errors.append(float((kind.weights(chosen).T - weight)[:, :half].square().sum()))
    assert errors[0] <= 1.001 * errors[1]


@pytest.mark.parametrize("name", ["Q3_K", "Q4_K", "IQ2_XXS"])
def test_the_scale_of_the_hessian_makes_no_difference(name: str) -> None:
    weight, hessian = _problem()
    kind = types.load(name)
    scaled = (hessian, hessian * 2.0**20, hessian * 2.0**-40)
    first, *others = (solve(weight, kind, part, factor_for(part, kind)) for part in scaled)
    assert all(other.equal(first) for other in others)


def test_a_curvature_that_rounding_made_negative_moves_no_scale() -> None:
    kind = types.load("Q6_K")
    size = kind.stored.block
    factors, multiples = torch.full((1, 2), 0.01), torch.full((size // kind.group, 2), 5.0)
    part = _SuperBlock(
        kind, torch.full((size, 2), 3.0), factors, multiples, None, -torch.eye(size), torch.ones(size, 2)
    )
    part.move()
    assert not part.shifts.any() and (factors == 0.01).all() and (multiples == 5).all()


def test_a_scale_and_a_minimum_move_together_to_their_joint_optimum() -> None:
    kind, random = types.load("Q4_K"), torch.Generator().manual_seed(0)
    inputs = torch.randn(64, kind.group, generator=random)
    hessian = inputs.T @ inputs
    levels = torch.randint(0, 16, (kind.group, 3), generator=random).float()
    factors = torch.tensor([[0.01] * 3, [0.05] * 3])
    scales, minima = torch.tensor([[20.0, 30, 40]]), torch.tensor([[31.0, 8, 17]])
    start = torch.tensor([[27.0, 30, 33]]), torch.tensor([[30.0, 14, 21]])
    target, weight = (levels * factors[0] * scale - factors[1] * low for scale, low in ((scales, minima), start))
    part = _SuperBlock(kind, levels, factors, *start, hessian, hessian @ (target - weight))
    part._move_both(0)
    assert start[0].equal(scales) and start[1].equal(minima)
    torch.testing.assert_close(weight + part.shifts, target)


def test_a_searched_scale_is_as_good_as_the_best_of_a_fine_grid() -> None:
    kind, random = types.load("IQ3_XXS"), torch.Generator().manual_seed(0)
    groups = torch.randn(16, 4, kind.group, generator=random)
    weights = torch.rand(4, kind.group, generator=random) + 0.1
    largest = groups.abs().amax(-1) / kind.levels().largest
    every = [_error(groups, largest * share, None, weights, kind)[0] for share in torch.linspace(0.5, 2.5, 40)]
    searched, _ = _error(groups, _symmetric(groups, weights, kind), None, weights, kind)
    assert searched.sum() <= 1.005 * torch.stack(every).amin(0).sum()


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_1"])
def test_a_refit_recovers_the_scales_and_minima_of_its_levels(kind: str) -> None:
    random = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 16, (3, 4, 32), generator=random).float()
    scales, minima = (torch.rand(3, 4, generator=random) + 0.5 for _ in range(2))
    groups = levels * scales.unsqueeze(-1) - minima.unsqueeze(-1)
    weights = torch.rand(3, 4, 32, generator=random) + 0.1
    found = _least_squares(groups, levels, weights, types.load(kind))
    torch.testing.assert_close(found, (scales, minima), rtol=1e-3, atol=1e-4)


def test_a_weight_beyond_float16_is_refused_with_a_remedy_that_helps() -> None:
    """Another dtype of the checkpoint changes nothing: the file format has float16 scales."""
    weight = torch.zeros(1, COLUMNS)
    weight[0, 0] = 1e5
    with pytest.raises(ModelError, match="beyond the range of torch.float16") as raised:
        round_blocks(weight, types.load("Q4_K"))
    assert "GGUF" in raised.value.hint and "convert" not in raised.value.hint
