"""Test the rows of a draft: its tokens, their distributions, and logits that are no numbers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.random_numbers import RandomNumbers
from mycli.runtime.sampling.sampler import Sampler

VOCAB = 50
CUT = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2, presence_penalty=0.5)


def random_logits(seed: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("seed", [None, 3])
def test_a_draft_token_is_drawn_from_the_distribution_of_its_position(seed: int | None, dtype: torch.dtype) -> None:
    """Rows that pad the head are never drafted; the compiled kernel draws fp32 rows alone."""
    padded = torch.cat((random_logits(7), torch.full((1, 6), 99.0)), dim=1)
    sampler = Sampler(replace(CUT, seed=seed), VOCAB, torch.device("cpu"))
    sampler.commit(padded, [3])
    out = sampler.probability_rows(1, dtype)
    assert out is not None
    token = sampler.sample_draft(padded, [5, 8], out)
    torch.testing.assert_close(out, sampler.probabilities(padded, [5, 8]), check_dtype=False)
    assert token is not None and out[0, token] > 0
    if seed is not None:
        chances = sampler.probabilities(padded, [5, 8])[0].double().cumsum(0)
        number = RandomNumbers(seed).take(3)[2]
        assert token == int((chances <= number * chances[-1]).sum()), "the number of the position it is drafted for"
    assert sampler.sample_draft(padded * math.nan, [5, 8], out) is None
    greedy = Sampler(SamplingParams(), VOCAB, torch.device("cpu"))
    assert greedy.probability_rows(1, torch.float32) is None
    assert greedy.sample_draft(padded, [5, 8], None) == int(padded[:, :VOCAB].argmax())
    assert greedy.sample_draft(padded * math.nan, [5, 8], None) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_likeliest_tokens_end_before_a_row_that_is_not_finite(value: float, dtype: torch.dtype) -> None:
    logits = torch.cat((random_logits(7, 4).to(dtype), torch.full((4, 6), 99.0, dtype=dtype)), dim=1)
    likeliest = logits[:, :VOCAB].argmax(-1).tolist()
    sampler = Sampler(SamplingParams(), VOCAB, torch.device("cpu"))
    assert sampler.best(logits) == likeliest
    for row in (3, 2, 0):
        logits[row] = value
        assert sampler.best(logits) == likeliest[:row]
