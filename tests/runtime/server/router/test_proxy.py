"""Test what a server for several models reads from a request that it forwards, and how it ends a failed stream."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from starlette.requests import Request

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.encoding import event
from mycli.runtime.server.http.keys import KeyShare
from mycli.runtime.server.router.proxy import (
    EventCount,
    ForwardedResponse,
    keep_alive_of,
    model_of,
    relabelled,
    stream_failure,
)

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
            b'event: error\ndata: {"type":"error","sequence_number":3,"code":"model_process_failed","message":"',
            b"}\n\n",
        ),
        ("/v1/chat/completions", b'data: {"error":{', b"data: [DONE]\n\n"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failed_stream_ends_in_the_form_of_its_interface(path: str, start: bytes, end: bytes) -> None:
    last = stream_failure(path, ERROR, 3)
    assert last.startswith(start) and last.endswith(end)


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_events_are_counted_however_a_stream_is_cut(size: int) -> None:
    stream = b"".join(event({"sequence_number": number, "text": "\n\n"}, "x") for number in range(5)) + b"event: x\n"
    events = EventCount()
    for start in range(0, len(stream), size):
        events.add(stream[start : start + size])
    assert events.count == 5


def test_the_error_at_the_end_of_a_stream_has_the_next_number() -> None:
    class Ends(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for number in range(2):
                yield event({"sequence_number": number}, "response.created")
            raise httpx2.ReadError("gone")

    @asynccontextmanager
    async def use(slot: object) -> AsyncIterator[Any]:
        transport = httpx2.MockTransport(lambda request: httpx2.Response(200, stream=Ends()))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield SimpleNamespace(client=client, ended=lambda: asyncio.sleep(0), exit_reason="killed")

    sent = list[bytes]()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.sleep(60)

    state = {"request_id": "r", "share": KeyShare()}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/responses",
        "query_string": b"",
        "headers": [],
        "state": state,
    }
    slot = SimpleNamespace(model=SimpleNamespace(name="pico"))
    response = ForwardedResponse(SimpleNamespace(use=use), slot, Request(scope), b"{}")  # type: ignore[arg-type]  # stubs
    asyncio.run(response(scope, receive, send))
    last = json.loads(sent[-1].partition(b"data: ")[2])
    assert (last["type"], last["sequence_number"], last["message"]) == ("error", 2, "pico failed: killed")


def test_the_description_names_all_models() -> None:
    schemas = {"Chat": {"properties": {"model": {"enum": ["a", None]}, "n": {}}}, "Other": {}}
    document = json.dumps({"info": {"title": "a"}, "components": {"schemas": schemas}}).encode()
    value = json.loads(relabelled(document, ["a", "b"]))
    assert value["info"] == {"title": "mycli"} and value["components"]["schemas"]["Other"] == {}
    assert value["components"]["schemas"]["Chat"]["properties"] == {"model": {"enum": ["a", "b", None]}, "n": {}}
