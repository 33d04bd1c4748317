"""The training loop: reproducible bit for bit; returns the best iterate on held-out windows, or nothing."""

import math

import pytest
import torch
from torch import Tensor

from mycli.quant.calibration.hessian import HELD_OUT_EVERY
from mycli.quant.planning.memory import BATCH
from mycli.quant.tuning.loop import count_steps, train

CPU = torch.device("cpu")
WINDOWS = 2 * HELD_OUT_EVERY
# Each window pulls towards its own point; the held-out ones, the last of every eight, towards others.
POINTS = torch.randn(WINDOWS, 3, generator=torch.Generator().manual_seed(0)) * 0.1 + 1


def run(points: Tensor, rate: float = 0.05, epochs: int = 8, at_once: int = 4) -> tuple[Tensor, float, float]:
    leaf = torch.zeros(3, requires_grad=True)
    seen: list[int] = []

    def loss(rows: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            seen.extend(rows.tolist())
        return (leaf - points[rows]).square().sum(1).mean()

    gained = train([([leaf], rate)], loss, WINDOWS, at_once, epochs, 0, CPU)
    assert {index % HELD_OUT_EVERY for index in seen} == set(range(HELD_OUT_EVERY - 1)), (
        "held-out windows are not fitted"
    )
    assert len(seen) == epochs * (WINDOWS - WINDOWS // HELD_OUT_EVERY)
    return leaf.detach(), gained.before, gained.after


def held(points: Tensor, leaf: Tensor) -> float:
    return float((leaf - points[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]).square().sum(1).mean())


def test_it_goes_down_and_says_what_the_windows_held_apart_say() -> None:
    leaf, before, after = run(POINTS)
    assert after < 0.2 * before
    assert abs(after - held(POINTS, leaf)) < 1e-6 and abs(before - held(POINTS, torch.zeros(3))) < 1e-6
    assert torch.equal(leaf, run(POINTS)[0]), "the same bits again"


def test_how_many_windows_pass_at_once_does_not_matter() -> None:
    torch.testing.assert_close(run(POINTS, at_once=1)[0], run(POINTS, at_once=4)[0])


def test_where_windows_held_apart_lose_nothing_changes() -> None:
    points = POINTS.clone()
    points[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] *= -1
    leaf, before, after = run(points)
    assert not leaf.any() and after == before


def test_the_best_iterate_is_kept_not_the_last() -> None:
    points = POINTS.clone()
    points[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] = 0.3  # on the way to the others
    leaf, before, after = run(points)
    assert after < before and float((leaf - 0.3).abs().max()) < 0.3


def test_the_best_iterate_of_few_steps_is_kept() -> None:
    leaf, held_out = torch.zeros(1, requires_grad=True), HELD_OUT_EVERY - 1

    def loss(rows: Tensor) -> Tensor:
        return (leaf - torch.where(rows == held_out, 0.3, 1.0)).square().mean()

    gained = train([([leaf], 0.2)], loss, HELD_OUT_EVERY, BATCH, 4, 0, CPU)
    assert count_steps(HELD_OUT_EVERY, 4) == 8
    assert gained.after < gained.before and 0.1 < float(leaf.detach()) < 0.5


def test_rates_fall_along_half_a_cosine() -> None:
    leaf = torch.zeros(1, requires_grad=True)
    steps: list[float] = []

    def loss(rows: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            steps.append(float(leaf.detach()))
        return 1000 - leaf.sum()  # of constant slope: Adam moves by the rate

    train([([leaf], 0.01)], loss, WINDOWS, BATCH, 8, 0, CPU)
    moves = [after - before for before, after in zip(steps, steps[1:], strict=False)]
    count = count_steps(WINDOWS, 8)
    assert len(steps) == count > 8
    expected = [0.01 * (1 + math.cos(math.pi * step / count)) / 2 for step in range(count - 1)]
    assert moves == pytest.approx(expected, rel=1e-3)


def test_a_loss_of_zero_is_left_alone() -> None:
    leaf, before, after = run_zero()
    assert before == after == 0 and not leaf.any()


def run_zero() -> tuple[Tensor, float, float]:
    leaf = torch.zeros(3, requires_grad=True)
    gained = train([([leaf], 1.0)], lambda rows: leaf.square().sum() * len(rows), WINDOWS, 4, 1, 0, CPU)
    return leaf.detach(), gained.before, gained.after
