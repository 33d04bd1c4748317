"""Test native softmax and sampling against torch and the definition, for every instruction set of the library."""

import math

import pytest
import torch

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.sample import best_tokens, softmax_draw

pytestmark = pytest.mark.usefixtures("vectors")

SIZES = [1, 5, 16, 255, 256, 257, 4096, 32000, 50257]


def logits_of(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("size", SIZES)
def test_the_softmax_is_torchs_and_the_draw_its_running_sum(size: int) -> None:
    logits = logits_of(size)
    logits[0, ::7] = -math.inf
    logits[0, size // 2] = 1.0
    wanted = logits.double().softmax(-1)
    sums = wanted[0].cumsum(0)
    for number in (0.0, 0.1, 0.5, 0.9, 0.999, 1 - 2**-49):
        out = torch.full((1, size), math.nan)
        token = softmax_draw(logits, number, out)
        assert isinstance(token, int) and wanted[0, token] > 0
        torch.testing.assert_close(out.double(), wanted, rtol=4e-6, atol=1e-36)
        before = float(sums[token - 1]) if token else 0.0
        assert before - 1e-6 <= number <= float(sums[token]) + 1e-6


@pytest.mark.parametrize("size", SIZES)
def test_the_likeliest_is_the_first_of_the_largest(size: int) -> None:
    """The rows are strided, with equal values, zeros of either sign, and NaN."""
    rows = torch.full((6, size + 3), math.inf)
    rows[:, :size] = logits_of(size).bfloat16().float()
    rows[1, :size] = -math.inf
    rows[2, size // 2] = math.nan
    rows[3, size - 1] = math.inf
    rows[4, :size] = 0.0
    rows[4, 0] = -0.0
    rows[5, size // 3] = rows[5, size - 1] = 99.0
    best = int((rows[0, :size] == rows[0, :size].max()).nonzero()[0])
    assert best_tokens(rows[:, :size]) == [best, None, None, None, 0, size // 3]
    assert best_tokens(rows[:1, :size]) == [best]


def test_zero_chance_stays_zero_at_the_ends() -> None:
    logits = torch.full((1, 300), -math.inf)
    logits[0, 7], logits[0, 290] = 0.0, -200.0
    out = torch.empty(1, 300)
    assert [softmax_draw(logits, number, out) for number in (0.0, 0.5, 1 - 2**-49)] == [7, 7, 7]
    assert out[0, 7] == 1 and int((out > 0).sum()) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 17, 298, 299])
def test_what_is_no_number_is_told(bad: float, place: int) -> None:
    logits = logits_of(300)
    logits[0, place] = bad
    assert softmax_draw(logits, 0.5, torch.empty(1, 300)) == 300
    assert softmax_draw(torch.full((1, 40), -math.inf), 0.5, torch.empty(1, 40)) == 40


def test_does_not_read_or_write_beyond_the_row() -> None:
    given, out = torch.full((1, 64), math.nan), torch.full((1, 64), 7.0)
    given[0, 10:43] = logits_of(33)
    assert softmax_draw(given[:, 10:43], 0.5, out[:, 10:43]) < 33  # type: ignore[operator]  # fp32 is accepted
    assert (out[0, :10] == 7).all() and (out[0, 43:] == 7).all()


def test_other_tensors_are_torchs() -> None:
    row = logits_of(64)
    for logits, out in (
        (row.double(), row.double()),
        (row, row.double()),
        (row.view(2, 32), torch.empty(2, 32)),
        (row[:, ::2], torch.empty(1, 32)),
    ):
        assert softmax_draw(logits, 0.5, out) == Declined("logits-not-one-fp32-row")
