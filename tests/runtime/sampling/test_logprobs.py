"""Test log-probabilities of drawn tokens against a softmax written out, and their limits."""

import math

import pytest
import torch

from mycli.runtime.errors import UsageError
from mycli.runtime.sampling.logprobs import MAX_TOP, LogprobRecorder, token_logprobs
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler

LOGITS = torch.tensor([[1.0, 3.0, 2.0, -1.0], [0.5, 0.0, 0.25, 4.0]])


def logs(row: list[float]) -> list[float]:
    total = math.log(sum(math.exp(value) for value in row))
    return [value - total for value in row]


def test_each_token_has_its_logprob_and_the_likeliest_of_its_row() -> None:
    for entry, token, row in zip(token_logprobs(LOGITS, [0, 2], 2), (0, 2), LOGITS.tolist(), strict=True):
        expected = logs(row)
        assert entry.token == token and entry.logprob == pytest.approx(expected[token])
        likeliest = sorted(range(4), key=lambda index: -row[index])[:2]
        assert [index for index, _ in entry.top] == likeliest
        assert [value for _, value in entry.top] == pytest.approx([expected[index] for index in likeliest])


def test_tokens_are_recorded_in_order_and_a_small_vocabulary_limits_the_list() -> None:
    recorder = LogprobRecorder(MAX_TOP)
    recorder.record(LOGITS, [0, 2])
    recorder.record(LOGITS[:1], [1])
    assert [entry.token for entry in recorder.entries] == [0, 2, 1]
    assert all(len(entry.top) == 4 for entry in recorder.entries)


def test_the_number_of_likeliest_tokens_is_bounded_as_in_openais_api() -> None:
    none = LogprobRecorder(0)
    none.record(LOGITS[:1], [1])
    assert none.entries[0].top == ()
    for top in (-1, 21):
        with pytest.raises(UsageError, match=f"top_logprobs {top} is out of range"):
            LogprobRecorder(top)


def test_a_rank_is_one_more_than_the_number_of_likelier_tokens() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    ranks = [token_logprobs(logits, [token], 0, ranked=True)[0].rank for token in range(4)]
    assert ranks == [4, 1, 3, 1] and token_logprobs(logits, [0], 0)[0].rank is None


def test_a_sampler_records_what_it_draws() -> None:
    recorder = LogprobRecorder(1)
    sampler = Sampler(SamplingParams(), 4, torch.device("cpu"), recorder=recorder)
    assert [int(sampler.sample(row[None])) for row in LOGITS] == [1, 3]
    assert [(entry.token, entry.top[0][0]) for entry in recorder.entries] == [(1, 1), (3, 3)]
