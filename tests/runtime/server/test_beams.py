"""Test beam search over HTTP with vLLM's fields, and what cannot be combined with it."""

from typing import Any

import pytest

from tests.support.served import Served

TEXT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "use_beam_search": True}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def texts(answer: Any) -> list[str]:
    return [choice.get("text", choice.get("message", {}).get("content")) for choice in answer.json["choices"]]


def test_the_best_of_as_many_replies_needs_no_search(served: Served) -> None:
    body = {"prompt": "Once upon", "max_tokens": 2, "n": 2, "best_of": 2}
    answer = served.ask("POST", "/v1/completions", body)
    assert answer.status == 200 and len(answer.json["choices"]) == 2


def test_n_beams_are_the_best_of_them(served: Served) -> None:
    four = served.ask("POST", "/v1/completions", {**TEXT, "n": 4})
    two = served.ask("POST", "/v1/completions", {**TEXT, "n": 2, "best_of": 4})
    assert four.status == 200, four.body
    assert len(set(texts(four))) == 4 and texts(two) == texts(four)[:2]
    assert four.json["usage"]["completion_tokens"] <= 48
    assert texts(served.ask("POST", "/v1/completions", {**TEXT, "n": 4, "temperature": 0, "top_k": -1})) == texts(four)


def test_equal_prompts_have_searches_of_their_own(served: Served) -> None:
    one = served.ask("POST", "/v1/completions", {**TEXT, "n": 2})
    both = served.ask("POST", "/v1/completions", {**TEXT, "prompt": [TEXT["prompt"]] * 2, "n": 2})
    assert texts(both) == texts(one) * 2


def test_a_search_without_a_limit_has_the_room_that_there_is(served: Served) -> None:
    limited = served.ask("POST", "/v1/completions", {**TEXT, "n": 8, "max_tokens": 490})
    assert limited.status == 400 and "8 beams of 490 tokens" in limited.error["message"]
    answer = served.ask("POST", "/v1/completions", {**TEXT, "n": 8, "max_tokens": -1})
    assert answer.status == 200 and len(set(texts(answer))) == 8


def test_penalties_and_streams(served: Served) -> None:
    short, long = (
        served.chat(use_beam_search=True, n=3, max_tokens=40, length_penalty=penalty, early_stopping="never")
        for penalty in (-2.0, 2.0)
    )
    assert len(texts(short)[0]) <= len(texts(long)[0])
    events = served.chat(use_beam_search=True, n=3, max_tokens=40, length_penalty=2.0, stream=True).events
    streamed = [
        "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"][0]["index"] == i)
        for i in range(3)
    ]
    assert len(streamed) == 3 and len(set(streamed)) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"seed": 1}, "seed"),
        ({"stop": "a"}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "use_beam_search"),
        ({"tools": [TOOL], "tool_choice": "required"}, "use_beam_search"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 65}, "best_of"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": False, "best_of": 3}, "best_of"),
    ],
)
def test_settings_that_a_search_does_not_have_are_refused_by_name(
    fields: dict[str, Any], param: str, served: Served
) -> None:
    answer = served.chat(**{"use_beam_search": True, "n": 2, **fields})
    assert answer.status == 400 and answer.error["param"] == param and param in answer.error["message"]


def test_more_beams_than_the_server_runs_are_refused(served: Served) -> None:
    answer = served.chat(use_beam_search=True, n=9, max_tokens=4)
    assert answer.status == 400 and "at most 8 sequences" in answer.error["message"]
    answer = served.chat(use_beam_search=True, n=8, max_tokens=400)
    assert answer.status == 400 and "8 beams of 400 tokens" in answer.error["message"]
