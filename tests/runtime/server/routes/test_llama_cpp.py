"""Test limits, samplers and results of requests in the form of llama.cpp, without a server."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.replies.reader import Piece, ReplyReader
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.server.routes.llama_cpp import LineReader, LlamaCppRendering, LlamaCppRequest, prepare_replies
from mycli.runtime.server.service import Prepared, Service
from tests.support.served import unserved

PROMPT = [5, 6, 7, 8]
DEFAULTS = {"top_k": 40, "top_p": 0.9, "min_p": 0.1, "temperature": 0.7}


@pytest.fixture(scope="module")
def service(loaded: LoadedModel) -> Iterator[Service]:
    service = unserved(loaded, context=64)
    yield service
    service.close()


def body_of(**fields: Any) -> LlamaCppRequest:
    return LlamaCppRequest.model_validate(fields)


def prepared(service: Service, body: LlamaCppRequest, prompts: int = 1) -> Prepared:
    return prepare_replies(service, body, [PROMPT] * prompts, "prompt", fills=False)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 61),
        ({"n_predict": -1}, 61),
        ({"n_predict": 0}, 0),
        ({"n_predict": 5}, 5),
        ({"n_predict": 62}, 61),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "n_predict": 5}, 5),
        ({"max_tokens": 7, "n_predict": -1}, 61),
    ],
)
def test_a_reply_has_the_limit_of_the_request_or_the_room(service: Service, fields: dict[str, Any], limit: int) -> None:
    ((request, _),) = prepared(service, body_of(**fields)).requests
    assert request.limit == limit


@pytest.mark.parametrize(
    ("samplers", "changes", "omitted"),
    [
        (None, {}, []),
        (["top_k", "top_p", "min_p", "temperature", "penalties"], {}, []),
        (["temperature"], {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, []),
        (["top_k", "dry", "xtc"], {"top_p": 1.0, "min_p": 0.0, "temperature": 1.0}, []),
        (["top_k", "infill"], {"top_p": 1.0, "min_p": 0.0, "temperature": 0.0}, ["sampler infill"]),
        (["top_k", "top_p", "min_p", "temperature", "a b"], {}, ["sampler unprintable"]),
    ],
)
def test_settings_of_samplers_that_are_not_in_the_list_are_off(
    samplers: list[str] | None, changes: dict[str, Any], omitted: list[str]
) -> None:
    sampling, unknown = body_of(samplers=samplers, **DEFAULTS).sampling()
    assert {name: getattr(sampling, name) for name in DEFAULTS} == {**DEFAULTS, **changes} and unknown == omitted


@pytest.mark.parametrize(
    ("fields", "limited"),
    [
        ({}, False),
        ({"n_indent": 0, "t_max_predict_ms": 0}, False),
        ({"t_max_predict_ms": -1}, False),
        ({"t_max_predict_ms": 1}, True),
        ({"n_indent": 1}, True),
    ],
)
def test_lines_are_watched_where_one_may_end_the_reply(service: Service, fields: dict[str, Any], limited: bool) -> None:
    ((_, (reader,)),) = prepared(service, body_of(**fields)).requests
    assert isinstance(reader, LineReader if limited else ReplyReader)


def test_several_prompts_have_a_list_of_results(service: Service) -> None:
    body = body_of(n_probs=1, return_tokens=True, response_fields=["content", "timings/cache_n", "stop_type", "none/a"])
    request = prepared(service, body, 2)
    assert [(item.logprobs, [reader.index for reader in readers]) for item, readers in request.requests] == [
        (1, [0]),
        (1, [1]),
    ]
    assert prepared(service, body_of(n_probs=0)).requests[0][0].logprobs is None
    replies = [
        Piece(0, ("a\n",), tokens=(9,), end="stop"),
        Piece(1, ("b",), tokens=(9, 9), end="stop_string", stop="x"),
    ]
    both = LlamaCppRendering(service, request, body, truncated=False).whole(replies)
    assert both == [
        {"content": "a\n", "timings/cache_n": 0, "stop_type": "eos"},
        {"content": "b", "timings/cache_n": 0, "stop_type": "word"},
    ]
    alone = LlamaCppRendering(service, prepared(service, body), body, truncated=False).whole(replies[:1])
    assert alone == both[0]


def test_a_result_counts_what_has_arrived(service: Service) -> None:
    body = body_of(n_probs=1, return_tokens=True, stream=True)
    written = LlamaCppRendering(service, prepared(service, body), body, truncated=True)
    scores = (TokenLogprob(9, -1.0, ((9, -1.0),)),)
    pieces = [
        Piece(0, ("a\n",), tokens=(9,), logprobs=scores, cached_tokens=3),
        Piece(0, tokens=(10, 11)),
        Piece(0, ("b",), tokens=(12,), end="deadline", cached_tokens=1),
    ]
    lines = b"".join(line for piece in pieces for line in written.add(piece)).decode().split("\n\n")
    first, second, last = (json.loads(line.removeprefix("data: ")) for line in lines if line)
    assert (first["content"], first["tokens"], first["tokens_predicted"], first["stop"]) == ("a\n", [9], 1, False)
    assert [entry["id"] for entry in first["completion_probabilities"]] == [9] and first["id_slot"] == -1
    assert (second["content"], second["tokens"], second["tokens_predicted"]) == ("b", [12], 4)
    assert (last["content"], last["tokens"], last["stop"], last["stop_type"]) == ("", [], True, "limit")
    assert (last["tokens_predicted"], last["tokens_evaluated"], last["tokens_cached"]) == (4, 4, 8)
    assert last["has_new_line"] and last["truncated"] and last["timings"]["cache_n"] == 3
    assert last["timings"]["prompt_n"] == 1 and last["timings"]["predicted_n"] == 4
    assert last["generation_settings"]["n_predict"] == -1 and last["prompt"]
