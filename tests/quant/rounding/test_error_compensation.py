"""Targets that make up for earlier losses: regression where it helps on other tokens, nothing where it does not."""

import torch
from torch import Tensor

from mycli.quant.rounding.error_compensation import RIDGE, Moments, refit

SIZE, ROWS = 32, 12


def moments(x: Tensor, y: Tensor) -> Moments:
    result = Moments.zeros(SIZE, x.device)
    for start in range(0, len(x), 100):
        result.add(x[start : start + 100], y[start : start + 100])
    return result


def draw(tokens: int, seed: int) -> Tensor:
    return torch.randn(tokens, SIZE, generator=torch.Generator().manual_seed(seed))


WEIGHT = draw(ROWS, 9)


def test_moments_are_sums_over_rows() -> None:
    x, y = draw(250, 0), draw(250, 1)
    found = moments(x, y)
    assert torch.allclose(found.hessian, x.T @ x, rtol=1e-4, atol=1e-3)
    assert torch.allclose(found.drift, (y - x).T @ x, rtol=1e-4, atol=1e-3)


def test_a_linear_loss_is_undone() -> None:
    """y = M x for every token: the target is W M, up to the ridge, whatever the tokens."""
    mixing = torch.eye(SIZE) + 0.2 * draw(SIZE, 2)
    fitted, held = draw(4000, 0), draw(500, 1)
    target, share = refit(WEIGHT, moments(fitted, fitted @ mixing.T), moments(held, held @ mixing.T))
    assert share == 1
    hessian = fitted.T @ fitted
    damped = hessian + RIDGE * hessian.diagonal().mean() * torch.eye(SIZE)
    exact = WEIGHT + WEIGHT @ (mixing - torch.eye(SIZE)) @ hessian @ torch.linalg.inv(damped)
    assert torch.allclose(target, exact, atol=1e-3)


def test_noise_that_does_not_repeat_is_not_followed() -> None:
    """Few tokens, so that regression finds what is not there; the tokens held apart say so."""
    fitted, held = draw(40, 0), draw(400, 1)
    target, share = refit(WEIGHT, moments(fitted, fitted + draw(40, 3)), moments(held, held + draw(400, 4)))
    assert share < 0.1
    assert (target - WEIGHT).norm() < 0.1 * WEIGHT.norm()


def test_without_drift_or_tokens_held_apart_nothing_changes() -> None:
    x = draw(100, 0)
    for fitted, held in ((moments(x, x), moments(x, x)), (moments(x, 2 * x), Moments.zeros(SIZE, x.device))):
        target, share = refit(WEIGHT.bfloat16(), fitted, held)
        assert share == 0 and torch.equal(target, WEIGHT.bfloat16().float())
