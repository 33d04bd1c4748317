"""Test presence and frequency penalties against their definition, counted token by token, also for draft tokens."""

from collections import Counter

import pytest
import torch

from mycli.runtime.models.generation_config import GenerationDefaults
from mycli.runtime.sampling.params import SamplingParams, recommended
from mycli.runtime.sampling.sampler import Sampler

VOCAB = 12


def reference(logits: list[float], reply: list[int], presence: float, frequency: float) -> list[float]:
    """Compute OpenAI's formula: mu[j] - c[j] * frequency - (c[j] > 0) * presence."""
    counts = Counter(reply)
    return [mu - counts[token] * frequency - (counts[token] > 0) * presence for token, mu in enumerate(logits)]


@pytest.mark.parametrize("presence, frequency", [(1.0, 0.0), (0.0, 1.0), (1.5, 0.3), (-1.0, -0.2), (2.0, 2.0)])
def test_greedy_draws_are_those_of_the_formula(presence: float, frequency: float) -> None:
    settings = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    sampler = Sampler(settings, VOCAB, torch.device("cpu"))
    sampler.seen.observe_prompt([0, 1, 2, 3])  # the prompt does not count
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
    last = sampler.probabilities(logits[:1], [5, 4])
    torch.testing.assert_close(last[0], torch.tensor(reference(logits[0].tolist(), [4, 5, 4], 0.5, 0.25)).softmax(0))
    again = sampler.probabilities(logits[:1])
    torch.testing.assert_close(again[0], torch.tensor(reference(logits[0].tolist(), [4], 0.5, 0.25)).softmax(0))


def test_a_pass_that_draws_is_given_what_penalties_count() -> None:
    for settings in (SamplingParams(presence_penalty=0.1), SamplingParams(frequency_penalty=-0.1)):
        sampler = Sampler(settings, VOCAB, torch.device("cpu"))
        sampling = sampler.device_sampling()
        assert sampling is not None and sampling.seen is sampler.seen and not sampler.plain_greedy


@pytest.mark.parametrize("sampled", [False, True])
def test_tokens_that_a_model_suppresses_are_not_drawn_beside_a_bias_of_a_request(sampled: bool) -> None:
    model = recommended(GenerationDefaults(do_sample=sampled, suppressed=(3,)))
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4], logits[0, 5] = 60, 50, 20
    for params, expected in ((model, 4), (model.with_overrides({"logit_bias": ((4, -100.0),)}), 5)):
        assert int(Sampler(params, VOCAB, torch.device("cpu")).sample(logits)) == expected


def test_draft_tokens_count_as_seen_in_the_rows_after_them() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), 6, torch.device("cpu"))
    sampler.seen.observe_prompt([1])
    seen, _ = sampler.seen.after(3, [3, 4])
    assert seen is not None and [row.nonzero().flatten().tolist() for row in seen] == [[1], [1, 3], [1, 3, 4]]
    seen, _ = sampler.seen.after(1, [3, 4])
    assert seen is not None and seen[0].nonzero().flatten().tolist() == [1, 3, 4]
