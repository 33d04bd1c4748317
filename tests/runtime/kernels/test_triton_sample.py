"""Test token selection on the device against torch's argmax and the host's draws, in the interpreter."""

import math
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mycli.runtime.sampling.logits_processors import SeenTokens, distribution
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import tokens_at
from tests.support.grids import chosen
from tests.support.random_tensors import normal
from tests.support.triton_interpreter import Interpret, interpret

pytest.importorskip("triton")

from mycli.runtime.kernels.triton import sample  # noqa: E402  (only where Triton is)
from mycli.runtime.kernels.triton.sample import (  # noqa: E402  (as above)
    NO_NUMBER,
    NUMBER_BITS,
    Penalties,
    SamplingBuffers,
    sample_tokens,
)
from mycli.runtime.kernels.triton.top_k_top_p import Filters, Limit, find_limit  # noqa: E402  (as above)

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


DRAWN = [Case(3, 2500, padding=9), Case(2, 5000, dtype=torch.bfloat16)]


def logits_of(case: Case, seed: int = 0) -> Tensor:
    """Return coarse logits, so that many are equal; the padding is the largest."""
    logits = (normal(case.sequences, case.vocab, seed=seed) * 2).round()
    return torch.cat((logits, torch.full((case.sequences, case.padding), 99.0)), dim=1).to(case.dtype)


def most_likely(case: Case) -> bool:
    """Return whether tokens equal torch's step by step and are fed back with lengths increased by one."""
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
    """Return the tokens chosen and fed back if a logit of the second of three sequences is `value`."""
    logits = torch.zeros(3, 3000)
    logits[:, 2000] = 9.0
    logits[1, slice(None) if place < 0 else place] = value
    to = SamplingBuffers.make(1, 3, logits.device)
    to.temperature.fill_(0.1)
    to.numbers.fill_(1 << 62)
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


PENALIZED = SamplingParams(
    temperature=1.3, top_k=400, top_p=0.95, min_p=0.002, repetition_penalty=1.3, presence_penalty=0.5
)
SETTINGS = {
    "warm": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=2.0),
    "cut": SamplingParams(temperature=1.5, top_k=30, top_p=0.9),
    "penalized": PENALIZED,
    "negative": replace(PENALIZED, temperature=1.0, repetition_penalty=0.7, frequency_penalty=-0.25),
}
_NUMBERS = 40  # for each row


def draws(case: Case, name: str) -> tuple[list[int], list[int]]:
    """Return draws of device and host with the same random numbers, including the smallest and the largest."""
    sampling, generator = SETTINGS[name], torch.Generator().manual_seed(1)
    logits = (normal(case.sequences, case.vocab + case.padding) * 3).to(case.dtype)
    logits[:, case.vocab :] = 99.0
    to = SamplingBuffers.make(1, case.sequences, logits.device)
    penalties = Penalties.make(case.sequences, case.vocab, logits.device)
    seen = SeenTokens(sampling, case.vocab, logits.device, case.sequences)
    drawn = torch.randint(0, case.vocab, (9, case.sequences, 1), generator=generator, device="cpu")
    for tokens in drawn.to(logits.device):
        seen.observe(tokens)
    for buffer, value in (
        (to.temperature, sampling.temperature),
        (to.top_k, sampling.top_k or case.vocab),
        (to.top_p, sampling.top_p),
        (to.min_p, sampling.min_p),
        (penalties.repetition, sampling.repetition_penalty),
        (penalties.presence, sampling.presence_penalty),
        (penalties.frequency, sampling.frequency_penalty),
    ):
        buffer.fill_(value)
    filters = Filters(sampling.top_k > 0, sampling.top_p < 1, sampling.min_p > 0, seen.needed)
    shares = torch.rand(_NUMBERS, case.sequences, generator=generator, dtype=torch.float64, device="cpu")
    shares[0], shares[1] = 0.0, 1 - 2**-50
    weights = distribution(logits[:, : case.vocab].float(), sampling, seen.seen, seen.counts)
    limits: list[Limit] = []

    def find_once(*arguments: Any) -> Limit:
        """Find the limit of top-k and top-p, which no random number changes, for the first number only."""
        if not limits:
            limits.append(find_limit(*arguments))
        return limits[0]

    found, expected = [], []
    for row in shares:
        to.numbers.copy_((row * 2.0**NUMBER_BITS).long())
        if seen.needed:
            for into, values in ((penalties.seen, seen.seen), (penalties.counts, seen.counts)):
                into.zero_() if values is None else into.copy_(values)
        with mock.patch.object(sample, "find_limit", find_once):
            sample_tokens(logits, case.vocab, True, to, 0, filters, penalties if seen.needed else None)
        found += to.chosen[0].tolist()
        expected += tokens_at(weights, row.tolist())[:, 0].tolist()
    return found, expected


@pytest.mark.parametrize(
    ("case", "name"),
    chosen(
        [(case, name) for case in (DRAWN[0], DRAWN[1]) for name in SETTINGS],
        quick=[(DRAWN[0], "penalized"), (DRAWN[1], "cut")],
    ),
    ids=str,
)
def test_draws_are_the_hosts(case: Case, name: str, interpret: Interpret) -> None:
    found, expected = interpret(draws, case, name)  # type: ignore[misc]  # the pool carries any result
    assert found == expected and len(set(found)) > 10


def counted() -> list[list[float]]:
    """Return the penalty counts of two sequences after their tokens, one of them a padding row that counts too."""
    device = torch.get_default_device()
    to, penalties = SamplingBuffers.make(1, 2, device), Penalties.make(2, 9, device)
    penalties.repetition.fill_(4.0)
    logits = torch.tensor([[0.0] * 7 + [3.0, 2.0], [5.0] + [0.0] * 8])
    for _ in range(3):
        sample_tokens(logits, 9, False, to, 0, Filters(penalties=True), penalties)
    return [penalties.seen[0].tolist(), penalties.counts[0].tolist(), penalties.counts[1].tolist()]


def test_chosen_tokens_are_counted_for_the_next_step(interpret: Interpret) -> None:
    """The likeliest token is the first again, since 3 / 4 is below 2, which becomes 2 / 4."""
    seen, counts, others = interpret(counted)  # type: ignore[misc]  # the pool carries any result
    assert seen == [0] * 7 + [1, 1] and counts == [0] * 7 + [2, 1] and others == [3] + [0] * 8


def test_logits_that_do_not_fit_are_refused() -> None:
    to = SamplingBuffers.make(1, 2, torch.device("cpu"))
    for logits in (torch.zeros(2, 5), torch.zeros(9, 2).t()):
        with pytest.raises(ValueError, match="strides"):
            sample_tokens(logits, 6, False, to, 0)
