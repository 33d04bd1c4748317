"""Test what the guard passes on, counts, logs and writes into headers, without a server around it."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mycli.runtime.server.http import guard
from mycli.runtime.server.http.guard import Guard
from mycli.runtime.server.http.settings import CLIENT_HEADER, ServerLimits, ServerSettings, ServerState
from mycli.runtime.tokenizer.prompt_difference import Difference


@dataclass
class Seen:
    """The traces of a request through the guard."""

    statuses: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    running: list[int] = field(default_factory=list)  # requests that the server counts, within the route and after it

    @property
    def status(self) -> int:
        (status,) = self.statuses
        return status

    @property
    def record(self) -> Any:
        return json.loads(self.lines[-1])


def send(
    path: str = "/v1/models",
    method: str = "GET",
    headers: Sequence[tuple[str, str]] = (),
    *,
    state: Mapping[str, Any] | None = None,
    client: tuple[str, int] | None = ("10.0.0.7", 5),
    reads: bool = False,
    begins: bool = True,
    fails: BaseException | None = None,
    draining: bool = False,
    **settings: Any,
) -> Seen:
    """Send a request to a route that sets `state`, reads the body if `reads`, and fails after its head if `begins`."""
    seen, server = Seen(), ServerState(ServerSettings(("pico",), log_format="json", **settings))
    server.draining = draining

    async def route(scope: Scope, receive: Receive, reply: Send) -> None:
        scope["state"].update(state or {})
        seen.running.append(server.requests)
        if reads:
            await receive()
        if begins:
            await Response(b"ok")(scope, receive, reply)
        if fails is not None:
            raise fails

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def write(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.statuses.append(message["status"])
            seen.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}

    pairs = [(name.encode(), value.encode()) for name, value in [("host", "localhost"), *headers]]
    scope = {"type": "http", "path": path, "raw_path": path.encode(), "method": method, "headers": pairs, "state": {}}
    scope |= {"client": client, "scheme": "http", "http_version": "1.1"}
    with nullcontext() if fails is None else suppress(type(fails)):
        asyncio.run(Guard(route, server, seen.lines.append)(scope, receive, write))
    seen.running.append(server.requests)
    return seen


@pytest.mark.parametrize(("length", "logged"), [(100, "/" + "a" * 99), (101, "/" + "a" * 98 + "…")])
def test_the_log_has_at_most_100_characters_of_a_path_and_a_client(length: int, logged: str) -> None:
    text = "/" + "a" * (length - 1)
    assert send(text).record["route"] == logged
    assert send(headers=[(CLIENT_HEADER, text)], supervised=True).record["client"] == logged


def test_the_log_has_the_address_of_the_client() -> None:
    claimed = [(CLIENT_HEADER, "10.9.9.9")]
    assert send(headers=claimed).record["client"] == "10.0.0.7", "only another server of this user states it"
    assert send(client=None).record["client"] == "" and send(supervised=True).record["client"] == ""


@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 431)])
def test_headers_have_a_number_and_a_size(more: int, status: int) -> None:
    pairs = [("a", "12"), ("b", "1" * (2 + more))]
    size = len("hostlocalhost") + 6
    assert send(headers=pairs, limits=ServerLimits(header_bytes=size)).status == status
    assert send(headers=[("a", "1")] * (4 + more), limits=ServerLimits(headers=5)).status == status


def test_posts_are_counted_while_they_run() -> None:
    assert send("/v1/completions", "POST").running == [1, 0] and send().running == [0, 0]


@pytest.mark.parametrize(
    ("expect", "reads", "closes"),
    [("100-continue", False, True), ("100-Continue", False, True), ("100-continue", True, False), ("", False, False)],
)
def test_a_connection_ends_where_a_client_may_not_send_its_body(expect: str, reads: bool, closes: bool) -> None:
    """The client waits for permission; without a request for its body, it cannot know whether to send it."""
    headers = [("expect", expect)] if expect else []
    assert (send(method="POST", headers=headers, reads=reads).headers.get("connection") == "close") == closes


def test_parts_that_were_left_out_are_listed_once_in_ascii() -> None:
    assert "x-mycli-omitted" not in send(state={"omitted": []}).headers
    assert send(state={"omitted": ["field é", "a", "a"]}).headers["x-mycli-omitted"] == "field ?, a"
    assert len(send(state={"omitted": ["a" * 1024]}).headers["x-mycli-omitted"]) == 1024
    assert len(send(state={"omitted": ["a" * 1025]}).headers["x-mycli-omitted"]) == 1024


def test_keywords_that_were_left_out_of_a_schema_are_named_in_the_log_too() -> None:
    seen = send(state={"loosened": ["a.b", "é"]})
    assert seen.headers["x-mycli-loosened"] == "a.b, \\xe9"
    assert seen.lines[0].endswith(" left out of the schema: a.b, é") and len(seen.lines) == 2
    assert send(state={"loosened": ["a" * 1000]}).headers["x-mycli-loosened"] == "a" * 1000
    assert send(state={"loosened": ["a" * 1001]}).headers["x-mycli-loosened"] == "a" * 999 + "\\u2026"
    assert len(send(state={"loosened": []}).lines) == 1


WHY = [("x-mycli-cache", "why")]


def test_a_miss_of_the_cache_is_described_where_a_client_wants_it() -> None:
    missed = Difference(3, 8, 9, "before", "earlier", "later", ["the tools changed", "a turn changed"])
    seen = send(headers=WHY, state={"difference": missed})
    shown = json.loads(seen.headers["x-mycli-cache"])
    assert shown == {name: value for name, value in missed.fields().items() if name != "earlier"}
    assert seen.record["missed"] == "token 3 of 9: the tools changed, a turn changed"
    assert "x-mycli-cache" not in send(state={"difference": missed}).headers
    assert "x-mycli-cache" not in send(headers=[("x-mycli-cache", "no")], state={"difference": missed}).headers
    assert "x-mycli-cache" not in send(headers=WHY).headers
    unknown = send(state={"difference": Difference(3, 8, 9)}).record["missed"]
    assert unknown == "token 3 of 9: another conversation"
    assert send(state={"difference": Difference(8, 8, 9)}).record["missed"] is None


def test_a_request_that_another_server_answered_is_in_its_log() -> None:
    assert send(state={"forwarded": True}).lines == []


@pytest.mark.parametrize(
    ("fails", "status"), [(RuntimeError("a bug"), 500), (asyncio.CancelledError(), 503)], ids=["bug", "shutdown"]
)
def test_only_a_response_that_has_not_begun_becomes_an_error(fails: BaseException, status: int) -> None:
    assert send(begins=False, fails=fails).statuses == [status] and send(fails=fails).statuses == [200]


def test_a_server_that_drains_takes_no_new_work() -> None:
    assert [send(method=method, draining=True).status for method in ("GET", "POST")] == [200, 503]


@pytest.mark.parametrize(
    ("path", "route"), [("/", "/"), ("/v1/models/", "/v1/models"), ("//v1/models//", "/v1/models"), ("/web/", "/web/")]
)
def test_a_slash_at_the_end_counts_only_among_the_files_of_the_page(path: str, route: str) -> None:
    assert send(path).record["route"] == route


def test_the_log_has_the_duration_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "time", SimpleNamespace(perf_counter=iter((100.0, 102.5)).__next__))
    assert send().record["seconds"] == 2.5
