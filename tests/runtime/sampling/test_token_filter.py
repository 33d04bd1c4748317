"""Test that a reply has only allowed tokens and no bad words, by vLLM's rule written out token by token."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler, sample_rows
from mycli.runtime.sampling.token_filter import TokenFilter

VOCAB = 12
Filter = tuple[set[int] | None, Sequence[tuple[int, ...]]]  # allowed tokens, None for all, and words
FILTERS: dict[str, Filter] = {
    "allowed": ({2, 5, 7}, ()),
    "word": (None, ((3,), (5, 7), (7, 7, 2))),
    "both": ({2, 3, 5, 7}, ((3,), (5, 7), (7, 2))),
}
FILTERED = pytest.mark.parametrize("name", FILTERS)


def reference(tokens: Filter, reply: Sequence[int]) -> set[int]:
    """Return the tokens that may follow `reply`."""
    allowed = set(range(VOCAB) if tokens[0] is None else tokens[0])
    for word in tokens[1]:
        if len(word) <= len(reply) + 1 and list(reply[len(reply) - len(word) + 1 :]) == list(word[:-1]):
            allowed.discard(word[-1])
    return allowed


def start(tokens: Filter, temperature: float = 1.0, **others: Any) -> Sampler:
    chosen = TokenFilter.of(VOCAB, *tokens)
    return Sampler(SamplingParams(temperature, seed=1), VOCAB, torch.device("cpu"), token_filter=chosen, **others)


def possible(row: Tensor) -> set[int]:
    return {token for token, share in enumerate(row.tolist()) if share > 0}


@FILTERED
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_every_token_may_follow_those_before_it(name: str, temperature: float) -> None:
    sampler, reply = start(FILTERS[name], temperature), list[int]()
    generator = torch.Generator().manual_seed(3)
    for _ in range(60):
        logits = torch.randn(1, VOCAB, generator=generator)
        may_follow = reference(FILTERS[name], reply)
        assert possible(sampler.probabilities(logits)[0]) == may_follow or not temperature
        reply.append(int(sampler.sample(logits)))
        assert reply[-1] in may_follow
        if not temperature:
            assert reply[-1] == max(may_follow, key=lambda token: float(logits[0, token]))
    assert len(set(reply)) > 2


@FILTERED
def test_rows_of_a_draft_are_successive_positions(name: str) -> None:
    sampler, draft = start(FILTERS[name]), [5, 7, 7, 2]
    sampler.commit(torch.zeros(2, VOCAB), [7, 5])
    rows = sampler.probabilities(torch.zeros(5, VOCAB), draft)
    for count, row in enumerate(rows):
        assert possible(row) == reference(FILTERS[name], [7, 5, *draft[:count]])
    later = sampler.probabilities(torch.zeros(1, VOCAB), draft[:2])
    assert possible(later[0]) == reference(FILTERS[name], [7, 5, 5, 7])
    out = torch.empty(1, VOCAB)
    sampler.sample_draft(torch.zeros(1, VOCAB), draft[:3], out)
    assert possible(out[0]) == reference(FILTERS[name], [7, 5, 5, 7, 7])
    resumed = start(FILTERS[name])
    resumed.resume([7, 5], shortened=False)
    assert torch.equal(resumed.probabilities(torch.zeros(1, VOCAB)), sampler.probabilities(torch.zeros(1, VOCAB)))


def test_rows_of_other_requests_are_unchanged() -> None:
    """Requests are sampled in one call, filtered ones between others."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5))
    stored = logits.clone()
    plain = [Sampler(SamplingParams(), VOCAB, torch.device("cpu")) for _ in range(2)]
    chosen = sample_rows(logits, [plain[0], start(FILTERS["allowed"]), plain[1], start(FILTERS["word"], 0.0)])
    assert [chosen[0], chosen[2]] == stored[[0, 2]].argmax(-1).tolist() and chosen[1] in (2, 5, 7)
    assert torch.equal(logits, stored)
    sampler = start(FILTERS["word"], 0.0)
    assert sampler.masks_tokens and not sampler.plain and not sampler.plain_greedy


def test_without_a_token_that_may_follow_the_reply_is_an_error() -> None:
    sampler = start(({2, 5}, ((5, 2), (5, 5))), 0.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1
    assert int(sampler.sample(logits)) == 5
    with pytest.raises(ModelError, match="leave no token that may follow"):
        sampler.sample(logits)
    with pytest.raises(ModelError, match="not a number"):
        start(FILTERS["word"]).sample(logits * math.nan)


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (({VOCAB}, ()), "allowed_token_ids: there is no token 12"),
        (({VOCAB, 1}, ()), "allowed_token_ids: there is no token 12"),
        ((None, ((1, VOCAB + 1),)), "bad_words: there is no token 13"),
        ((None, ((1, VOCAB + 1), (2, 3))), "bad_words: there is no token 13"),
        (({3}, ((3,),)), "no token that is not a bad word"),
    ],
)
def test_filters_that_cannot_be_met_are_refused(tokens: Filter, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        start(tokens)


def test_stop_tokens_are_masked_too() -> None:
    sampler = start(({2, 5}, ()), stop_ids=(5,), min_tokens=1)
    assert int(sampler.sample(torch.zeros(1, VOCAB))) == 2
    assert possible(sampler.probabilities(torch.zeros(1, VOCAB))[0]) == {2, 5}


def test_words_of_any_length_are_known_by_the_tokens_of_the_reply_before_them() -> None:
    tokens: Filter = (None, ((5, 7), (7, 7, 2)))
    sampler = start(tokens)
    sampler.commit(torch.zeros(2, VOCAB), [7, 7])
    rows = sampler.probabilities(torch.zeros(2, VOCAB), [5])
    assert [possible(row) for row in rows] == [reference(tokens, [7, 7]), reference(tokens, [7, 7, 5])]
    assert 2 not in possible(rows[0]) and 7 not in possible(rows[1])
