"""Test how messages of chat requests are read, and how tokens of several replies are counted."""

import json
import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.engine.sequence import Request
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.recording import ReplyIds
from mycli.runtime.server.requests.schemas import ChatMessage, StreamFigures, StreamOptions
from mycli.runtime.server.routes import wire
from mycli.runtime.server.routes.completions import CompletionRequest, TextRendering
from mycli.runtime.server.routes.wire import (
    OpenAIRendering,
    TokenCounts,
    chat_logprobs,
    chat_messages,
    completion_logprobs,
)
from mycli.runtime.server.service import Prepared
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.served import Served

_USAGE = {"include_usage": True}


@pytest.mark.parametrize(
    "thought",
    [
        {"type": "thinking", "thinking": "Think.", "signature": "x"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Think."}], "closed": True},
        {"type": "reasoning", "reasoning": "Think."},
        {"type": "reasoning", "text": "Think."},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Think."}]},
    ],
    ids=["anthropic", "mistral", "langchain", "ai-sdk", "responses"],
)
def test_parts_of_reasoning_are_the_reasoning_of_the_assistant(thought: dict[str, Any]) -> None:
    parts = [thought, {"type": "redacted_thinking", "data": "eA=="}, {"type": "text", "text": "Four."}]
    talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": parts}]
    _, reply = chat_messages([ChatMessage.model_validate(message) for message in talk])
    assert (reply.content, reply.reasoning) == ("Four.", "Think.")
    with pytest.raises(ApiError, match="is not supported"):
        chat_messages([ChatMessage.model_validate({"role": "user", "content": parts})])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_cached_tokens_of_several_prompts_are_added(served: Served, stream: bool) -> None:
    prompts = ["One " * 40, "Two " * 60]

    def cached(prompt: Any, **fields: Any) -> int:
        body = {"prompt": prompt, "max_tokens": 1, "stream": stream, **fields}
        answer = served.ask("POST", "/v1/completions", body | ({"stream_options": _USAGE} if stream else {}))
        usage = (answer.events[-1] if stream else answer.json)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached(prompts)
    alone = [cached(prompt) for prompt in prompts]
    assert min(alone) > 16 and cached(prompts) == cached(prompts, n=2) == sum(alone)


class Letters:
    """Has the token 97 for "a" and so on; 1000 is a second token for "a"."""

    def token_bytes(self, token: int) -> bytes:
        return b"a" if token == 1000 else bytes([token])


LETTERS = cast(Tokenizer, Letters())
A, B, C = ord("a"), ord("b"), ord("c")


def test_log_probabilities_are_finite_and_rounded() -> None:
    logprobs = [
        TokenLogprob(A, -0.12345678, ((A, -0.12345678), (B, -2.0), (C, -math.inf))),
        TokenLogprob(0xFF, -1.0, ()),
    ]
    first, cut = chat_logprobs(LETTERS, logprobs)["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("a", [A], -0.123457) and cut["token"] == "\ufffd"
    assert [(other["token"], other["logprob"]) for other in first["top_logprobs"]] == [
        ("a", -0.123457),
        ("b", -2.0),
        ("c", -9999.0),  # JSON has no infinity
    ]
    assert [len(chat_logprobs(LETTERS, logprobs[:1], most)["content"][0]["top_logprobs"]) for most in (0, 2)] == [0, 2]


def test_the_likeliest_of_tokens_with_the_same_text_stands_for_all() -> None:
    tops = ((1000, -0.5), (B, -1.0), (A, -3.0), (C, -4.0))
    lists, offset = completion_logprobs(LETTERS, [B, TokenLogprob(A, -3.0, tops), TokenLogprob(C, -9.0, tops)], 5, 3)
    assert lists["tokens"] == ["b", "a", "c"] and lists["text_offset"] == [5, 6, 7] and offset == 8
    assert lists["token_logprobs"] == [None, -3.0, -9.0]
    # The sampled token is among the alternatives, whatever their number.
    assert lists["top_logprobs"] == [None, {"a": -0.5, "b": -1.0}, {"a": -0.5, "b": -1.0, "c": -9.0}]


def prepared_for(prompts: int) -> Prepared:
    reader = cast(Any, SimpleNamespace(index=0))
    return Prepared([(Request((1,) * 5), [reader])] * prompts, [(1,) * 5] * prompts)


def test_tokens_are_counted_over_all_pieces() -> None:
    prepared = prepared_for(2)
    counts = TokenCounts(prepared)
    prepared.figures.prompt = 10
    prepared.figures.add_cached(0, 2)
    for piece in (Piece(tokens=(1, 2, 3), reasoning_tokens=1), Piece(tokens=(4,), reasoning_tokens=1)):
        counts.add(piece)
    usage = counts.usage()
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (10, 4, 14)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}


@pytest.mark.parametrize(("ttft", "prompt_seconds"), [(2.0, 2.0), (0.5, 0.5), (None, 10.0)])
def test_times_of_a_reply_are_those_of_its_prompt_and_of_its_tokens(
    ttft: float | None, prompt_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(wire, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    prepared = prepared_for(1)
    rendering = OpenAIRendering(prepared, {"id": "x"}, StreamOptions(include_usage=True), StreamFigures())
    prepared.figures.prompt, prepared.figures.ttft = 5, ttft
    prepared.figures.add_cached(0, 2)
    now[0] = 110.0
    summary, end = rendering.finish()
    timings = json.loads(summary.decode().removeprefix("data: "))["timings"]
    milliseconds = 1000 * prompt_seconds
    assert timings == {
        **{"cache_n": 2, "prompt_n": 3, "predicted_n": 0},
        **{"prompt_ms": milliseconds, "predicted_ms": 10_000 - milliseconds},
        **{"prompt_per_token_ms": round(milliseconds / 3, 3), "predicted_per_token_ms": 0.0},
        **{"prompt_per_second": round(3 / prompt_seconds, 3), "predicted_per_second": 0.0},
    }
    assert end == b"data: [DONE]\n\n"
    assert list(OpenAIRendering(prepared, {}, StreamOptions(), StreamFigures()).finish()) == [end]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Provide the time in seconds, which a test sets."""
    now = [100.0]
    monkeypatch.setattr(wire, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def a_stream(replies: int, **fields: Any) -> TextRendering:
    """Return the rendering of a stream of replies to a prompt of five tokens."""
    prepared = Prepared([(Request((1,) * 5), cast(Any, [None] * replies))], [(1,) * 5])
    service: Any = SimpleNamespace(name="pico", loaded=SimpleNamespace(tokenizer=LETTERS))
    body = CompletionRequest.model_validate({"prompt": "Leo", "stream": True, **fields})
    return TextRendering(service, prepared, body, ReplyIds("cmpl-1", 7))


def events(lines: Iterable[bytes]) -> list[Any]:
    return [json.loads(line.decode().removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(
    ("fields", "usage", "timings"),
    [
        ({}, [], [3]),
        ({"stream_options": {"include_usage": True}}, [], []),  # a last event without choices has both
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, [0, 1, 2, 3], []),
        ({"stream_options": {"continuous_usage_stats": True}}, [], [3]),
        ({"timings_per_token": True}, [], [0, 1, 2, 3]),
    ],
)
def test_usage_and_times_are_in_the_chunks_that_a_client_chooses(
    fields: dict[str, Any], usage: list[int], timings: list[int], clock: list[float]
) -> None:
    written, chunks = a_stream(2, **fields), list[Any]()
    pieces = (
        *(Piece(0, ("a",), tokens=(A,)), Piece(1, ("b",), tokens=(B,))),
        *(Piece(0, ("c",), tokens=(C,), end="stop"), Piece(1, ("c",), tokens=(C,), end="stop")),
    )
    assert all("timings" not in event for event in events(written.keep_alive())), "there is no token yet"
    for piece in pieces:
        clock[0] += 2
        chunks += events(written.add(piece))
    assert [index for index, chunk in enumerate(chunks) if "usage" in chunk] == usage
    assert [index for index, chunk in enumerate(chunks) if "timings" in chunk] == timings
    if timings:
        shown = chunks[-1]["timings"]
        assert (shown["prompt_ms"], shown["predicted_ms"], shown["predicted_n"]) == (2000, 6000, 4)
    if usage:
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4]


@pytest.mark.parametrize("shown", [True, False])
def test_the_progress_of_a_prompt_is_shown_where_it_has_grown(shown: bool, clock: list[float]) -> None:
    written, seen = a_stream(2, return_progress=shown), list[Any]()
    for index, tokens in ((0, 0), (0, 1), (0, 1), (1, 4), (0, 5), (1, 4)):
        clock[0] += 0.25
        seen += events(written.add(Piece(index, prompt_tokens=tokens, cached_tokens=1)))
    assert [(chunk["choices"][0]["index"], chunk["prompt_progress"]) for chunk in seen] == [
        (index, {"total": 5, "cache": 1, "processed": tokens, "time_ms": milliseconds})
        for index, tokens, milliseconds in ((0, 1, 500), (1, 4, 1000), (0, 5, 1250))
        if shown
    ]
