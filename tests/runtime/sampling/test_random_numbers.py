"""Test the range of the random numbers with which tokens are drawn."""

import pytest
import torch
from torch import Tensor

from mycli.runtime.sampling.random_numbers import RandomNumbers


@pytest.mark.parametrize(("drawn", "low", "high"), [(0.0, 0.0, 0.0), (1 - 2**-53, 1 - 2**-49, 1 - 2**-50)])
def test_the_largest_number_times_a_sum_is_less_than_the_sum(
    monkeypatch: pytest.MonkeyPatch, drawn: float, low: float, high: float
) -> None:
    """The generator's largest number would round up to it."""

    def rand(count: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return torch.full((count,), drawn, dtype=dtype)

    monkeypatch.setattr(torch, "rand", rand)
    assert low <= RandomNumbers(1).take(1)[0] <= high
