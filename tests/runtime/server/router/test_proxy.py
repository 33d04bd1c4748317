"""Test what a server for several models reads from a request that it forwards, and how it ends a failed stream."""

import json
from typing import Any

import pytest

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.router.proxy import keep_alive_of, model_of, relabelled, stream_failure

ERROR = ApiError(502, "the model has ended", "model_process_failed")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"model": "a"}, "a"),
        ({"name": "a"}, "a"),
        ({"model": "a", "name": "b"}, "a"),
        ({"model": None, "name": "b"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_the_model_of_a_body(body: dict[str, Any], name: str | None) -> None:
    assert model_of(body) == name


@pytest.mark.parametrize(("body", "words"), [([], "an object, not list"), ({"model": 7}, "must be a string")], ids=str)
def test_a_body_that_names_no_model_is_refused(body: object, words: str) -> None:
    with pytest.raises(ApiError, match=words) as error:
        model_of(body)
    assert error.value.status == 400


def test_how_long_a_model_stays_loaded() -> None:
    assert keep_alive_of({"keep_alive": "2m"}) == (120.0,) and keep_alive_of({"keep_alive": -1}) == (None,)
    assert keep_alive_of({"keep_alive": "soon"}) == keep_alive_of({}) == keep_alive_of([]) == ()


@pytest.mark.parametrize(
    ("path", "start", "end"),
    [
        ("/api/chat", b'{"error":"the model has ended"}', b"\n"),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{', b"}\n\n"),
        (
            "/v1/responses",
            b'event: error\ndata: {"type":"error","code":"model_process_failed","message":"the model',
            b"}\n\n",
        ),
        ("/v1/chat/completions", b'data: {"error":{', b"data: [DONE]\n\n"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failed_stream_ends_in_the_form_of_its_interface(path: str, start: bytes, end: bytes) -> None:
    last = stream_failure(path, ERROR)
    assert last.startswith(start) and last.endswith(end)


def test_the_description_names_all_models() -> None:
    schemas = {"Chat": {"properties": {"model": {"enum": ["a", None]}, "n": {}}}, "Other": {}}
    document = json.dumps({"info": {"title": "a"}, "components": {"schemas": schemas}}).encode()
    value = json.loads(relabelled(document, ["a", "b"]))
    assert value["info"] == {"title": "mycli"} and value["components"]["schemas"]["Other"] == {}
    assert value["components"]["schemas"]["Chat"]["properties"] == {"model": {"enum": ["a", "b", None]}, "n": {}}
