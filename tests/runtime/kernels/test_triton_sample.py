"""Tokens chosen on the device: torch's maximum, or distributed as softmax (chi squared), in the interpreter."""

import math
from dataclasses import dataclass

import pytest
import torch
from scipy.stats import chisquare, kstest
from torch import Tensor

from tests.support.random_tensors import normal
from tests.support.triton_interpreter import Interpret, interpret

pytest.importorskip("triton")

import triton  # noqa: E402  (only where Triton is)
import triton.language as tl  # noqa: E402  (as above)

from mycli.runtime.kernels.triton.sample import NO_NUMBER, SamplingBuffers, _gumbel, sample_tokens  # noqa: E402  (as above)

__all__ = ["interpret"]

STEPS = 3


@dataclass(frozen=True)
class Case:
    sequences: int
    vocab: int
    padding: int = 0
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.sequences}x{self.vocab}+{self.padding}-{self.dtype}".replace("torch.", "")


def logits_of(case: Case, seed: int = 0) -> Tensor:
    """Coarse, so that many are equal; the padding is the largest."""
    logits = (normal(case.sequences, case.vocab, seed=seed) * 2).round()
    return torch.cat((logits, torch.full((case.sequences, case.padding), 99.0)), dim=1).to(case.dtype)


def most_likely(case: Case) -> bool:
    """Whether tokens are torch's, step by step, and fed back with lengths one larger."""
    to = SamplingBuffers.make(STEPS, case.sequences, torch.get_default_device())
    to.lengths.copy_(torch.arange(case.sequences) + 5)
    for step in range(STEPS):
        logits = logits_of(case, seed=step)
        sample_tokens(logits, case.vocab, False, to, step)
        expected = logits[:, : case.vocab].float().argmax(dim=-1)
        assert to.chosen[step].equal(expected) and to.tokens[:, 0].equal(expected)
        assert to.lengths.equal(torch.arange(case.sequences, dtype=torch.int32) + 6 + step)
    return True


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 7),
        Case(2, 1024, padding=1),
        Case(3, 5000, padding=64, dtype=torch.bfloat16),
        Case(1, 1025, dtype=torch.float16),
    ],
    ids=str,
)
def test_the_likeliest_is_torchs_lowest_among_equals(case: Case, interpret: Interpret) -> None:
    assert interpret(most_likely, case)


def spoiled(value: float, place: int, draw: bool) -> list[list[int]]:
    """The tokens chosen and fed back where a logit of the second of three sequences is `value`."""
    logits = torch.zeros(3, 3000)
    logits[:, 2000] = 9.0
    logits[1, slice(None) if place < 0 else place] = value
    to = SamplingBuffers.make(1, 3, logits.device)
    to.temperature.fill_(0.1)
    sample_tokens(logits, 3000, draw, to, 0)
    return [to.chosen[0].tolist(), to.tokens[:, 0].tolist()]


@pytest.mark.parametrize("draw", [False, True], ids=["greedy", "drawn"])
@pytest.mark.parametrize(("value", "place"), [(math.nan, 5), (math.nan, 2999), (math.inf, 0), (-math.inf, -1)])
def test_logits_that_are_no_numbers_are_told_and_token_0_is_fed_back(
    value: float, place: int, draw: bool, interpret: Interpret
) -> None:
    assert interpret(spoiled, value, place, draw) == [[2000, NO_NUMBER, 2000], [2000, 0, 2000]]


def test_a_logit_of_minus_infinity_is_never_chosen(interpret: Interpret) -> None:
    for draw in (False, True):
        assert interpret(spoiled, -math.inf, 5, draw) == [[2000, 2000, 2000], [2000, 2000, 2000]]


def draws(logits: Tensor, vocab: int, temperature: float, seed: int, length: int) -> Tensor:
    """One for every row of logits."""
    to = SamplingBuffers.make(1, len(logits), logits.device)
    to.lengths.fill_(length)
    to.seed.fill_(seed)
    to.temperature.fill_(temperature)
    sample_tokens(logits, vocab, True, to, 0)
    return to.chosen[0].clone()


@triton.jit
def noise_kernel(out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]  # device code carries no types
    place = tl.arange(0, COUNT)
    tl.store(out + place, _gumbel(tl.full((), -5, tl.int64), place * 0 + 17, place * 0 + 1, place))


def noise(count: int) -> Tensor:
    out = torch.empty(count)
    noise_kernel[(1,)](out, COUNT=count)
    return out.cpu()


def test_noise_is_gumbels_and_the_rare_large_values_have_all_their_digits(interpret: Interpret) -> None:
    """A uniform number of 24 bits has a few values for the noise that lets a token of 1e-6 win."""
    found = interpret(noise, 1 << 19)
    assert isinstance(found, Tensor) and found.isfinite().all()
    assert kstest(found.numpy(), "gumbel_r").pvalue > 1e-4
    shares = (-found.double()).exp().sort().values[:2000]
    assert len(shares.unique()) > 1990 and kstest((shares / shares[-1]).numpy(), "uniform").pvalue > 1e-4


SMALL = torch.tensor([2.0, 1.0, 0.0, 1.0, -1.0, -4.0, 3.0, 0.5])
ROWS = 40


def counts(temperature: float, launches: int) -> list[int]:
    logits = torch.cat((SMALL.to(torch.get_default_device()), torch.full((5,), 50.0))).expand(ROWS, -1)
    found = [draws(logits, len(SMALL), temperature, -7, length) for length in range(launches)]
    return torch.cat(found).bincount(minlength=len(SMALL)).tolist()


@pytest.mark.parametrize(
    ("temperature", "launches"),
    [(0.7, 4), *(pytest.param(warm, 10, marks=pytest.mark.slow) for warm in (0.7, 1.7))],
)
def test_draws_are_distributed_as_softmax(temperature: float, launches: int, interpret: Interpret) -> None:
    """Draws of one launch differ by their sequence, launches by their position."""
    found = interpret(counts, temperature, launches)
    expected = (SMALL / temperature).double().softmax(-1) * ROWS * launches
    assert chisquare(found, expected.numpy()).pvalue > 1e-4  # type: ignore[arg-type]  # a list of numbers


def repeats() -> list[list[int]]:
    logits = normal(4, 300)
    settings = [(1, 5), (1, 5), (1, 6), (2, 5), (1 + (1 << 40), 5), (-1, 5)]
    return [draws(logits[:1].expand(4, -1), 300, 2.0, seed, length).tolist() for seed, length in settings]


def test_a_draw_depends_on_seed_position_and_sequence_alone(interpret: Interpret) -> None:
    first, again, *others = interpret(repeats)  # type: ignore[misc]  # the pool carries any result
    assert first == again and len(set(first)) > 1
    assert all(other != first for other in others) and len({str(other) for other in others}) == len(others)


def test_logits_that_do_not_fit_are_refused() -> None:
    to = SamplingBuffers.make(1, 2, torch.device("cpu"))
    for logits in (torch.zeros(2, 5), torch.zeros(9, 2).t()):
        with pytest.raises(ValueError, match="strides"):
            sample_tokens(logits, 6, False, to, 0)
