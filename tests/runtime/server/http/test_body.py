"""Test the limits of a request's body, which are exact, and which types of content it may have."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import Request

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.body import MAX_BODY_OBJECTS, MAX_BODY_VALUES, parse_body, read_body
from mycli.runtime.server.http.settings import ServerLimits

JSON = ("content-type", "application/json")
LIMIT = 10


def read(parts: Sequence[bytes], *headers: tuple[str, str], path: str = "/v1/completions", gone: bool = False) -> bytes:
    messages: list[Any] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.disconnect"} if gone else {"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Any:
        return messages.pop(0)

    pairs = [(name.encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": pairs}
    scope |= {"server": ("localhost", 80), "scheme": "http"}
    return asyncio.run(read_body(ServerLimits(body_bytes=LIMIT), Request(scope, receive)))


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1])
def test_a_body_has_at_most_as_many_bytes_as_the_limit(length: int) -> None:
    halves = [b"x" * 5, b"x" * (length - 5)]
    for headers in ([JSON], [JSON, ("content-length", str(length))]):
        if length <= LIMIT:
            assert read(halves, *headers) == b"x" * length
        else:
            with pytest.raises(ApiError) as error:
                read(halves, *headers)
            assert (error.value.status, error.value.code) == (413, "request_too_large")


@pytest.mark.parametrize("length", ["-1", "a", str(LIMIT + 1), "1" * 30])
def test_a_length_is_checked_before_the_body_is_read(length: str) -> None:
    with pytest.raises(ApiError) as error:
        read([], JSON, ("content-length", length))
    assert error.value.status == 413


@pytest.mark.parametrize(
    ("path", "headers", "accepted"),
    [
        ("/v1/completions", [("content-type", "Application/JSON ; charset=utf-8")], True),
        ("/v1/completions", [], False),
        ("/v1/completions", [("content-type", "text/plain")], False),
        ("/api/chat", [], True),
        ("/api/chat", [("content-type", "text/plain")], True),
        ("/api/chat", [("content-type", "text/plain"), ("origin", "http://localhost")], False),
        ("/api/chat", [("content-type", "text/plain"), ("sec-fetch-site", "cross-site")], False),
        ("/api/chat", [JSON, ("origin", "http://localhost")], True),
        ("/api/chat", [("content-type", "multipart/form-data")], False),
        ("/v1/completions", [JSON, ("content-encoding", "identity")], True),
        ("/v1/completions", [JSON, ("content-encoding", "gzip")], False),
    ],
)
def test_a_body_is_json_or_of_a_client_that_is_no_page(path: str, headers: list[Any], accepted: bool) -> None:
    if accepted:
        assert read([b"{}"], *headers, path=path) == b"{}"
        return
    with pytest.raises(ApiError) as error:
        read([b"{}"], *headers, path=path)
    assert error.value.status == 415


def test_a_client_that_leaves_ends_its_request() -> None:
    with pytest.raises(ApiError) as error:
        read([b"{"], JSON, gone=True)
    assert (error.value.status, error.value.code) == (499, "client_gone")


def test_values_and_objects_are_counted_before_they_are_parsed() -> None:
    assert (MAX_BODY_VALUES, MAX_BODY_OBJECTS) == (524_288, 65_536)
    # A bracket and the commas between values.
    assert len(parse_body(b"[" + b"1," * (MAX_BODY_VALUES - 1) + b"1]")) == MAX_BODY_VALUES
    with pytest.raises(ApiError, match="more than 524288 values"):
        parse_body(b"[" + b"1," * MAX_BODY_VALUES + b"1]")
    with pytest.raises(ApiError, match="more than 524288 values"):
        parse_body(b'"' + b"{" * (MAX_BODY_VALUES // 2) + b"[" * (MAX_BODY_VALUES // 2) + b',"')
    objects = b"[" + b"{}," * (MAX_BODY_OBJECTS - 1)
    assert len(parse_body(objects + b"{}]")) == MAX_BODY_OBJECTS
    assert len(parse_body(objects + b'{}, "{\\n{\\n"]')) == MAX_BODY_OBJECTS + 1, "braces in a string are no objects"
    with pytest.raises(ApiError, match="more than 65536 objects") as error:
        parse_body(objects + b"{}, {}]")
    assert (error.value.status, error.value.code) == (400, "too_many_values")
