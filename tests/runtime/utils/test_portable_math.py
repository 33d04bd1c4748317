"""Test functions with the same bits everywhere: near the exact value, and the same steps in Python's floats."""

import math
from decimal import Decimal

import pytest
import torch
from torch import Tensor

from mycli.runtime.utils.portable_math import exp_of, exponential, log_softmax, mean, tangent, total


def points(count: int = 4000) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    spread = torch.rand(count, dtype=torch.float64, generator=draw)
    return torch.cat([-40 * spread, -(2.0 ** (-60 * spread)), torch.tensor([0.0, -0.0, -708.0, -math.inf])])


def by_steps(x: float) -> float:
    """Compute e^x in the documented order, one number at a time."""
    power = round(x * math.log2(math.e))
    rest = (x - power * 6.93147180369123816490e-01) - power * 1.90821492927058770002e-10
    value = 1 / math.factorial(13)
    for term in range(12, -1, -1):
        value = value * rest + 1 / math.factorial(term)
    return math.ldexp(value, power)


def test_exponentials_are_exact_to_the_last_bits_and_the_same_everywhere() -> None:
    x = points()
    found = exponential(x)
    assert found[-4:].tolist() == [1.0, 1.0, 0.0, 0.0]
    for given, value in zip(x[:-4].tolist(), found.tolist(), strict=False):
        assert value == by_steps(given)
        exact = Decimal(given).exp()
        assert abs(Decimal(value) - exact) <= 2 * Decimal(math.ulp(float(exact)))


def test_tangents_are_those_of_fp32_and_keep_the_sign() -> None:
    x = torch.cat([points(), -points()])
    assert torch.equal(tangent(x).signbit(), x.signbit())
    torch.testing.assert_close(tangent(x), torch.tanh(x), rtol=2**-30, atol=2**-52)
    assert tangent(torch.tensor([math.inf, -math.inf], dtype=torch.float64)).tolist() == [1.0, -1.0]


@pytest.mark.parametrize("width", [1, 2, 3, 7, 64, 100])
def test_sums_add_halves(width: int) -> None:
    values = torch.randn(3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))
    for row, found in zip(values.tolist(), total(values).tolist(), strict=True):
        row += [0.0] * ((1 << (width - 1).bit_length()) - width)
        while len(row) > 1:
            half = len(row) // 2
            row = [a + b for a, b in zip(row[:half], row[half:], strict=True)]
        assert found == row[0]


def test_log_probabilities_add_up_to_one_and_keep_what_is_excluded() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(2)) * 9
    logits[1, 7] = -math.inf
    found = log_softmax(logits)
    expected = logits.double().log_softmax(1).float()
    assert found.dtype == torch.float32 and found[1, 7] == -math.inf
    torch.testing.assert_close(found, expected, rtol=2**-23, atol=0)


def test_means_and_powers_are_rounded_once() -> None:
    assert mean([1e16, 1.0, -1e16, 1.0]) == 0.5
    for value in (0.1, 3.6109, 12.25, -2.0):
        assert exp_of(value) == float(Decimal(value).exp()) == pytest.approx(math.exp(value), rel=1e-15)
