"""Test the fields allowed_token_ids and bad_words of completions and chats, also next to other requests."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.served import Served, joined

TEXT = "/v1/completions"


def reply_ids(served: Served, **fields: Any) -> list[int]:
    answer = served.chat(return_token_ids=True, **fields)
    assert answer.status == 200, answer.body
    ids: list[int] = answer.json["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize("settings", [{}, {"temperature": 1, "seed": 4}, {"logprobs": True}], ids=str)
def test_only_allowed_tokens_are_sampled(served: Served, settings: dict[str, Any]) -> None:
    allowed = [5, 70, 71, 200]
    ids = reply_ids(served, allowed_token_ids=allowed, max_tokens=12, **settings)
    assert len(ids) == 12 and set(ids) <= {*allowed}  # no end token is among them
    body = {"prompt": "Once", "allowed_token_ids": [77], "max_tokens": 4, "return_token_ids": True, **settings}
    answer = served.ask("POST", TEXT, {**body, "logprobs": 1} if "logprobs" in settings else body)
    assert answer.json["choices"][0]["token_ids"] == [77] * 4


def test_an_end_token_that_is_allowed_ends_the_reply(served: Served) -> None:
    ends = sorted(served.service.loaded.stop_ids)
    assert ends and joined(served.chat(allowed_token_ids=ends, max_tokens=9))[::3] == ("", "stop")


@pytest.mark.parametrize("settings", [{}, {"temperature": 1, "seed": 4}], ids=str)
def test_bad_words_are_not_in_a_reply(served: Served, settings: dict[str, Any]) -> None:
    whole = reply_ids(served, max_tokens=12, **settings)
    text = joined(served.chat(max_tokens=12, **settings))[0]
    word = text.split()[1]
    other = joined(served.chat(bad_words=[word], max_tokens=12, **settings))[0]
    assert word in text.split() and word not in other.split()
    # The tokens of a word may be in a reply, where others are between them.
    sequence = served.ask("POST", "/detokenize", {"tokens": whole[:3]}).json["prompt"]
    changed = reply_ids(served, bad_words=[sequence], max_tokens=12, **settings)
    assert changed[:2] == whole[:2] and changed[2] != whole[2]


def test_requests_next_to_filtered_ones_are_unchanged(served: Served) -> None:
    questions = ["What is the capital of Japan?", "Tell me a story.", "Count to five."]
    requests: list[dict[str, Any]] = [
        *({"text": text, **settings} for text in questions for settings in ({}, {"temperature": 1, "seed": 7})),
        *({"text": text, "allowed_token_ids": list(range(60, 400))} for text in questions),
        *({"text": text, "bad_words": ["the", "a", "is"]} for text in questions),
    ]
    alone = [reply_ids(served, max_tokens=16, **request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda request: reply_ids(served, max_tokens=16, **request), requests))
    assert together == alone
    assert reply_ids(served, max_tokens=16, text=questions[0]) == alone[0] != alone[6]


def test_the_same_request_twice_shares_its_prefix_and_not_its_filter(served: Served) -> None:
    first = reply_ids(served, max_tokens=6)
    banned = served.ask("POST", "/detokenize", {"tokens": first[:1]}).json["prompt"]
    assert reply_ids(served, bad_words=[banned], max_tokens=6)[0] != first[0]
    assert reply_ids(served, max_tokens=6) == first
    both = served.chat(bad_words=[banned], allowed_token_ids=first[:1], max_tokens=6)
    assert both.status == 400 and both.error["param"] == "allowed_token_ids"
