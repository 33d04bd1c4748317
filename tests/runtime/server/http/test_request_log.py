"""Test lines of the request log: all that a request had, and nothing for what it did not have."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from mycli.runtime.server.http.request_log import RequestFigures, RequestRecord

TIME = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
REFUSED = RequestRecord(TIME, "127.0.0.1", "req-1", "POST", "/v1/completions", "pico", 400, 0.0123456789)
FIGURES = RequestFigures(prompt=20, completion=3, ttft=0.0512345678, tpot=0.0123456789)
HEAD = "2026-01-02T03:04:05.678+00:00 127.0.0.1 POST /v1/completions 400 · pico · 0.012 s"
TOKENS = "prompt 20 (0 cached) · completion 3"


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (REFUSED, "req-1"),
        (replace(REFUSED, figures=FIGURES), f"{TOKENS} · TTFT 51 ms · TPOT 12.3 ms · req-1"),
        (replace(REFUSED, figures=replace(FIGURES, tpot=None)), f"{TOKENS} · TTFT 51 ms · req-1"),
        (replace(REFUSED, figures=replace(FIGURES, ttft=None, tpot=None)), f"{TOKENS} · req-1"),
        (
            replace(REFUSED, key="ci", missed="7: a", omitted=["user", "store"]),
            "key ci · cache missed at 7: a · left out: user, store · req-1",
        ),
    ],
    ids=["refused", "complete", "one-token", "no-token", "notes"],
)
def test_a_line_of_text_has_what_the_request_had(record: RequestRecord, text: str) -> None:
    assert record.line("text") == f"{HEAD} · {text}"


def test_a_line_of_json_has_all_fields() -> None:
    first = {
        "time": "2026-01-02T03:04:05.678+00:00",
        "client": "127.0.0.1",
        "request_id": "req-1",
        "method": "POST",
        "route": "/v1/completions",
        "model": "pico",
        "status": 400,
        "seconds": 0.012346,
    }
    figures = dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens", "ttft", "tpot"))
    empty = {**first, **figures, "omitted": [], "key": None, "missed": None}
    assert json.loads(REFUSED.line("json")) == empty
    figures = {"prompt_tokens": 20, "cached_tokens": 0, "completion_tokens": 3, "ttft": 0.051235, "tpot": 0.012346}
    notes = {"omitted": ["user"], "key": "ci", "missed": "7: ä"}
    record = replace(REFUSED, figures=FIGURES, omitted=("user",), key="ci", missed="7: ä")
    assert json.loads(record.line("json")) == {**first, **figures, **notes} and "ä" in record.line("json")
    without = json.loads(replace(REFUSED, figures=RequestFigures(prompt=2)).line("json"))
    assert (without["ttft"], without["tpot"], without["prompt_tokens"]) == (None, None, 2)


def test_cached_tokens_are_counted_once_for_each_prompt_and_never_exceed_it() -> None:
    figures = RequestFigures(prompt=20)
    for prompt, tokens, cached in ((0, 5, 5), (0, 3, 5), (1, 4, 9), (0, 8, 12), (1, 13, 20)):
        figures.add_cached(prompt, tokens)
        assert figures.cached == cached
