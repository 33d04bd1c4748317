"""Test the levels of ggml types: the nearest ones, and columns solved by tables and codebooks as by integers."""

import pytest
import torch
from torch import Tensor

from mycli.quant.ggml import types
from mycli.quant.ggml.levels import Codebook, Integers, Levels, Table

SIZE, ROWS = 32, 6


def _problem() -> tuple[Tensor, Tensor, Tensor]:
    """Return a target [SIZE, ROWS] in units of about 3 levels, a Hessian whose diagonal is not 1, and scales."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4 * SIZE, SIZE, generator=generator)
    scales = torch.rand(1, ROWS, generator=generator) + 0.5
    scales[0, 0] = 1
    target = 3 * torch.randn(SIZE, ROWS, generator=generator) * scales
    return target, inputs.T @ inputs / SIZE, scales.expand(SIZE, -1).contiguous()


@pytest.mark.parametrize(("bits", "low", "largest"), [(4, -8, 8), (8, -128, 128), (2, 0, 3), (5, 0, 31)])
def test_integers_reach_both_ends(bits: int, low: int, largest: int) -> None:
    levels, values = Integers(bits, low), torch.tensor([-1e3, 0.4, 1e3])
    assert levels.nearest(values, values).tolist() == [low, 0, low + 2**bits - 1] and levels.largest == largest


def test_the_nearest_value_of_a_table() -> None:
    table, values = Table((-9, -2, 1, 12)), torch.tensor([-50.0, -6, -5, -0.6, -0.4, 6, 7, 50])
    assert table.nearest(values, values).tolist() == [-9, -9, -2, -2, 1, 1, 12, 12] and table.largest == 12


@pytest.mark.parametrize("descent", [False, True])
def test_a_table_of_all_integers_solves_as_the_integers_do(descent: bool) -> None:
    target, hessian, scales = _problem()
    integers, table = Integers(4, -8), Table(tuple(range(-8, 8)))
    if descent:
        levels = integers.nearest(target / scales, target).to(torch.int8)
        residual, matrix = hessian @ (target - levels * scales), hessian
    else:
        levels, residual = None, target
        matrix = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    (expected, moved), (found, shifts) = (kind.solve(residual, matrix, scales, levels) for kind in (integers, table))
    assert found.equal(expected) and expected.abs().max() > 4
    torch.testing.assert_close(shifts, moved, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["IQ2_S", "IQ3_S"])
def test_the_nearest_vector_of_a_codebook_is_the_best_of_all(name: str) -> None:
    """Signs are free in these types, so they are those of the values."""
    levels = types.load(name).levels()
    assert isinstance(levels, Codebook) and not levels.even_signs
    generator, width = torch.Generator().manual_seed(0), levels.rows.shape[1]
    values = torch.randn(3, 2, 16, generator=generator) * levels.largest / 2
    weights = torch.rand(1, 2, 16, generator=generator) + 0.1
    found = levels.nearest(values, weights)
    assert (found.sign() == values.sign()).all()
    metric, magnitudes = weights.expand_as(values).reshape(-1, 1, width), levels.rows.float()
    errors = (metric * (values.abs().reshape(-1, 1, width) - magnitudes).square()).sum(2)
    chosen = (metric.squeeze(1) * (values - found).reshape(-1, width).square()).sum(1)
    torch.testing.assert_close(chosen, errors.amin(1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["Q4_0", "IQ4_NL", "IQ2_XXS", "IQ3_S"])
def test_descent_over_the_levels_never_increases_the_error(name: str) -> None:
    levels: Levels = types.load(name).levels()
    target, hessian, scales = _problem()
    scales[:, 1:] *= 8 / levels.largest
    grouped = (target / scales).T.contiguous().view(ROWS, 1, SIZE)
    start = levels.nearest(grouped, torch.ones(1, 1, SIZE)).reshape(ROWS, SIZE).T.contiguous().to(torch.int8)
    before = target - start * scales
    solved, shifts = levels.solve(hessian @ before, hessian, scales, start)
    after = target - solved * scales
    torch.testing.assert_close(shifts, before - after, rtol=1e-3, atol=1e-4)
    lost = [(error * (hessian @ error)).sum(0) for error in (before, after)]
    assert (lost[1] <= lost[0] * 1.0001).all() and lost[1].sum() < 0.98 * lost[0].sum()
