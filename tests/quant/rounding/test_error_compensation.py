"""Test error compensation: regression is applied where it helps on held-out tokens, and skipped otherwise."""

import pytest
import torch
from torch import Tensor

from mycli.quant.rounding import error_compensation
from mycli.quant.rounding.error_compensation import RIDGE, Moments, drift_rows, refit

SIZE, ROWS = 32, 12


def moments(x: Tensor, y: Tensor, weight: Tensor | None = None) -> Moments:
    result = Moments.zeros(SIZE, x.device, weight)
    for start in range(0, len(x), 100):
        result.add(x[start : start + 100], y[start : start + 100])
    return result.complete()


def draw(tokens: int, seed: int) -> Tensor:
    return torch.randn(tokens, SIZE, generator=torch.Generator().manual_seed(seed))


WEIGHT = draw(ROWS, 9)


def test_moments_are_sums_over_rows() -> None:
    x, y = draw(250, 0), draw(250, 1)
    found = moments(x, y)
    assert torch.allclose(found.hessian, x.T @ x, rtol=1e-4, atol=1e-3)
    assert torch.allclose(found.drift, (y - x).T @ x, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [SIZE, 27])
def test_wide_inputs_give_the_same_sums_and_target(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips below the diagonal and a drift of outputs, for a width that strips divide and for one they do not."""
    fitted, held = (draw(tokens, seed)[:, :size] for tokens, seed in ((400, 0), (100, 1)))
    others, weight = (fitted.roll(1, 1) * 1.1, held.roll(1, 1) * 1.1), WEIGHT[:4, :size]
    expected = refit(weight, *(_sums(x, y) for x, y in zip((fitted, held), others, strict=True)))
    monkeypatch.setattr(error_compensation, "_WIDE", size)
    wide = [_sums(x, y, weight) for x, y in zip((fitted, held), others, strict=True)]
    assert wide[0].drift.shape == (4, size)
    assert torch.allclose(wide[0].hessian, fitted.T @ fitted, rtol=1e-4, atol=1e-3)
    target, share = refit(weight, *wide)
    assert share == pytest.approx(expected[1], abs=1e-4) and share > 0.1
    assert torch.allclose(target, expected[0], atol=1e-4)


def _sums(x: Tensor, y: Tensor, weight: Tensor | None = None) -> Moments:
    result = Moments.zeros(x.shape[1], x.device, weight)
    result.add(x, y)
    return result.complete()


def test_the_drift_of_outputs_is_summed_where_that_is_less_work() -> None:
    assert drift_rows(896, 4864) == 896 and drift_rows(2400, 4864) == 2400  # down
    assert drift_rows(2500, 4864) == 4864
    assert drift_rows(9728, 896) == 896 and drift_rows(4096, 4096) == 4096  # gate_up, o
    assert drift_rows(64, 256) == 256  # narrow: the sums are unchanged


def test_a_linear_loss_is_undone() -> None:
    """With y = M x for every token, the target is W M, up to the ridge, for any tokens."""
    mixing = torch.eye(SIZE) + 0.2 * draw(SIZE, 2)
    fitted, held = draw(4000, 0), draw(500, 1)
    target, share = refit(WEIGHT, moments(fitted, fitted @ mixing.T), moments(held, held @ mixing.T))
    assert share == 1
    hessian = fitted.T @ fitted
    damped = hessian + RIDGE * hessian.diagonal().mean() * torch.eye(SIZE)
    exact = WEIGHT + WEIGHT @ (mixing - torch.eye(SIZE)) @ hessian @ torch.linalg.inv(damped)
    assert torch.allclose(target, exact, atol=1e-3)
    small, held = fitted * 2**-12, held * 2**-12
    target, share = refit(WEIGHT, moments(small, small @ mixing.T), moments(held, held @ mixing.T))
    assert share == 1 and torch.allclose(target, exact, atol=1e-3), "inputs of any size"


def test_noise_that_does_not_repeat_is_not_followed() -> None:
    """With few tokens, regression overfits; the held-out tokens show it."""
    fitted, held = draw(40, 0), draw(400, 1)
    target, share = refit(WEIGHT, moments(fitted, fitted + draw(40, 3)), moments(held, held + draw(400, 4)))
    assert share < 0.1
    assert (target - WEIGHT).norm() < 0.1 * WEIGHT.norm()


def test_without_drift_or_tokens_held_apart_nothing_changes() -> None:
    x = draw(100, 0)
    for fitted, held in ((moments(x, x), moments(x, x)), (moments(x, 2 * x), Moments.zeros(SIZE, x.device))):
        target, share = refit(WEIGHT.bfloat16(), fitted, held)
        assert share == 0 and torch.equal(target, WEIGHT.bfloat16().float())
