"""Test how messages of chat requests are read, and how tokens of several replies are counted."""

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.engine.sequence import Request
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.requests.schemas import ChatMessage, StreamFigures, StreamOptions
from mycli.runtime.server.routes import wire
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
