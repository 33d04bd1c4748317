"""Test presence and frequency penalties against their definition, counted token by token, also for draft tokens."""

from collections import Counter
from typing import Any

import pytest
import torch

from mycli.runtime.errors import UsageError
from mycli.runtime.models.generation_config import GenerationDefaults
from mycli.runtime.sampling.params import MAX_BIASES, SamplingParams, recommended
from mycli.runtime.sampling.sampler import Sampler

VOCAB = 12


def reference(logits: list[float], reply: list[int], presence: float, frequency: float) -> list[float]:
    """Compute OpenAI's formula: mu[j] - c[j] * frequency - (c[j] > 0) * presence."""
    counts = Counter(reply)
    return [mu - counts[token] * frequency - (counts[token] > 0) * presence for token, mu in enumerate(logits)]


@pytest.mark.parametrize("presence, frequency", [(0.5, 0.0), (0.0, 0.7), (1.5, 0.3), (-1.0, -0.2), (2.0, 2.0)])
def test_greedy_draws_are_those_of_the_formula(presence: float, frequency: float) -> None:
    settings = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    sampler = Sampler(settings, VOCAB, torch.device("cpu"))
    sampler.observe(torch.tensor([[0, 1, 2, 3]]))  # the prompt does not count
    noise, reply = torch.Generator().manual_seed(1), list[int]()
    for _ in range(60):
        logits = torch.randn(1, VOCAB, generator=noise)
        expected = reference(logits[0].tolist(), reply, presence, frequency)
        reply.append(int(sampler.sample(logits)))
        assert expected[reply[-1]] == pytest.approx(max(expected), abs=1e-5)


def test_a_draft_sees_the_tokens_before_it() -> None:
    """The rows of `probabilities` count exactly the draft tokens before them; `commit` makes the counts permanent."""
    settings = SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25, seed=1)
    sampler = Sampler(settings, VOCAB, torch.device("cpu"))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    sampler.commit(logits[:1], [4])
    found = sampler.probabilities(logits, [5, 4])
    for row, reply in enumerate(([4], [4, 5], [4, 5, 4])):
        expected = torch.tensor(reference(logits[row].tolist(), reply, 0.5, 0.25)).softmax(0)
        torch.testing.assert_close(found[row], expected)
    again = sampler.probabilities(logits[:1])
    torch.testing.assert_close(again[0], torch.tensor(reference(logits[0].tolist(), [4], 0.5, 0.25)).softmax(0))


def test_a_pass_that_draws_is_given_what_penalties_count() -> None:
    for settings in (SamplingParams(presence_penalty=0.1), SamplingParams(frequency_penalty=-0.1)):
        sampler = Sampler(settings, VOCAB, torch.device("cpu"))
        sampling = sampler.device_sampling()
        assert sampling is not None and sampling.seen is sampler.seen and not sampler.plain_greedy


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [2.1, -2.1, float("nan"), float("inf")])
def test_a_penalty_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams().with_overrides({name: value})


def test_what_a_model_recommends_gives_way_to_what_is_asked() -> None:
    chosen = recommended(GenerationDefaults(temperature=0.7, top_p=0.9, do_sample=True))
    assert (chosen.temperature, chosen.top_p) == (0.7, 0.9)
    assert chosen.with_overrides({"temperature": 0.0, "top_p": None}) == SamplingParams(top_p=0.9)
    assert recommended(GenerationDefaults(temperature=0.7, do_sample=False)) == SamplingParams()
    assert recommended(GenerationDefaults(top_k=5)).temperature == 0.0
    assert recommended(GenerationDefaults(top_k=5, do_sample=True)).temperature == 1.0


@pytest.mark.parametrize("sampled", [False, True])
def test_tokens_that_a_model_suppresses_are_not_drawn_beside_a_bias_of_a_request(sampled: bool) -> None:
    model = recommended(GenerationDefaults(do_sample=sampled, suppressed=(3,)))
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4], logits[0, 5] = 60, 50, 20
    for params, expected in ((model, 4), (model.with_overrides({"logit_bias": ((4, -100.0),)}), 5)):
        assert int(Sampler(params, VOCAB, torch.device("cpu")).sample(logits)) == expected


LARGEST, SMALLEST = (1 << 63) - 1, -(1 << 63)


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        ({"temperature": 100.0}, {"temperature": 100.001}),
        ({"top_k": 1 << 31}, {"top_k": (1 << 31) + 1}),
        ({"top_p": 0.0}, {"top_p": 1.001}),
        ({"min_p": 1.0}, {"min_p": -0.001}),
        ({"repetition_penalty": 10.0}, {"repetition_penalty": 10.01}),
        ({"presence_penalty": -2.0}, {"presence_penalty": 2.01}),
        ({"seed": LARGEST}, {"seed": LARGEST + 1}),
        ({"seed": SMALLEST}, {"seed": SMALLEST - 1}),
        ({"logit_bias": ((0, 100), (1, -100))}, {"logit_bias": ((0, -100.1),)}),
        ({"logit_bias": ((5, 1.0),) * MAX_BIASES}, {"logit_bias": ((5, 1.0),) * (MAX_BIASES + 1)}),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_the_ends_of_a_range_are_within_it(within: dict[str, Any], beyond: dict[str, Any]) -> None:
    (name, value), *_ = within.items()
    assert getattr(SamplingParams(**within), name) == value
    with pytest.raises(UsageError, match=name):
        SamplingParams(**beyond)


def test_the_seeds_of_replies_follow_each_other_and_wrap_around() -> None:
    assert [SamplingParams(seed=5).for_reply(index).seed for index in range(3)] == [5, 6, 7]
    assert SamplingParams(seed=LARGEST).for_reply(1).seed == SMALLEST
    assert SamplingParams(seed=SMALLEST).for_reply(0).seed == SMALLEST
    assert SamplingParams().for_reply(3) == SamplingParams()
