"""Test what a server for several models reads from a request that it forwards, and how it ends a failed stream."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any

import httpx2
import pytest
from starlette.requests import Request

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.encoding import event
from mycli.runtime.server.http.keys import KeyShare
from mycli.runtime.server.http.settings import CLIENT_HEADER, SHARE_HEADER
from mycli.runtime.server.router.proxy import (
    EventCount,
    ForwardedResponse,
    keep_alive_of,
    model_of,
    relabelled,
    stream_failure,
)

ERROR = ApiError(502, "the model has ended", "model_process_failed")
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


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


class Stream(httpx2.AsyncByteStream):
    """The parts of a stream, after which its process may die."""

    def __init__(self, *parts: bytes, dies: bool = False) -> None:
        self._parts, self._dies = parts, dies

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        if self._dies:
            raise httpx2.ReadError("gone")


def forward(
    answer: Callable[[httpx2.Request], httpx2.Response], path: str, headers: Mapping[str, str] = NO_HEADERS
) -> tuple[list[Any], dict[str, Any]]:
    """Forward a request to a process that gives `answer`; return the messages to the client and the request's state."""

    @asynccontextmanager
    async def use(slot: object) -> AsyncIterator[Any]:
        transport = httpx2.MockTransport(answer)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield SimpleNamespace(client=client, ended=lambda: asyncio.sleep(0), exit_reason="killed")

    sent = list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()  # the client stays

    state = {"request_id": "r", "share": KeyShare("ci", 2.0)}
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("10.0.0.7", 5),
        "state": state,
    }
    slot = SimpleNamespace(model=SimpleNamespace(name="pico"))
    response = ForwardedResponse(SimpleNamespace(use=use), slot, Request(scope), b"{}")  # type: ignore[arg-type]  # stubs
    asyncio.run(response(scope, receive, send))
    return sent, state


def test_the_error_at_the_end_of_a_stream_has_the_next_number() -> None:
    events = [event({"sequence_number": number}, "response.created") for number in range(2)]
    sent, _ = forward(lambda request: httpx2.Response(200, stream=Stream(*events, dies=True)), "/v1/responses")
    last = json.loads(sent[-1]["body"].partition(b"data: ")[2])
    assert (last["type"], last["sequence_number"], last["message"]) == ("error", 2, "pico failed: killed")


def test_a_process_that_dies_before_its_answer_is_an_error() -> None:
    def die(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ReadError("gone")

    for answer in (
        die,
        lambda request: httpx2.Response(200, headers={"content-length": "9"}, stream=Stream(dies=True)),
    ):
        with pytest.raises(ApiError, match="pico failed: killed") as error:
            forward(answer, "/v1/completions")
        assert (error.value.status, error.value.code) == (502, "model_process_ended")


def test_the_process_of_a_model_gets_no_key_and_the_client_no_header_of_its_connection() -> None:
    seen = list[httpx2.Headers]()

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.headers)
        return httpx2.Response(201, headers={"Date": "x", "server": "x", "x-mycli-omitted": "field a"}, content=b"ok")

    headers = {"host": "example.org", "authorization": "Bearer x", "x-api-key": "x", "x-request-id": "other"}
    sent, state = forward(answer, "/v1/completions", {**headers, "origin": "x", "x-mycli-cache": "why"})
    assert not {"authorization", "x-api-key", "origin"} & set(seen[0])
    names = ("host", "x-mycli-cache", "x-request-id", SHARE_HEADER, CLIENT_HEADER)
    assert [seen[0][name] for name in names] == ["localhost", "why", "r", "ci;2;0", "10.0.0.7"]
    head, body = sent
    assert head["status"] == 201 and {name.lower() for name, _ in head["headers"]} == {
        b"x-mycli-omitted",
        b"content-length",
    }
    assert body == {"type": "http.response.body", "body": b"ok"}
    assert state["forwarded"], "the log line is that of the process"


def test_a_stream_is_passed_on_part_by_part() -> None:
    sent, _ = forward(lambda request: httpx2.Response(200, stream=Stream(b"a", b"b")), "/v1/completions")
    assert [(message["body"], message.get("more_body", False)) for message in sent[1:]] == [
        (b"a", True),
        (b"b", True),
        (b"", False),
    ]


def test_the_description_names_all_models() -> None:
    schemas = {"Chat": {"properties": {"model": {"enum": ["a", None]}, "n": {}}}, "Other": {}}
    document = json.dumps({"info": {"title": "a"}, "components": {"schemas": schemas}}).encode()
    value = json.loads(relabelled(document, ["a", "b"]))
    assert value["info"] == {"title": "mycli"} and value["components"]["schemas"]["Other"] == {}
    assert value["components"]["schemas"]["Chat"]["properties"] == {"model": {"enum": ["a", "b", None]}, "n": {}}
