"""Reads the body of a request, within limits of bytes and values."""

from typing import Any

from starlette.requests import ClientDisconnect, Request

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.settings import ServerLimits
from mycli.runtime.utils.json_fields import strict_json
from mycli.runtime.utils.memory import gc_paused

CLIENT_GONE = 499  # nginx's status for a client that disconnected: only in the log
MAX_BODY_VALUES = 1 << 19  # in a body
MAX_BODY_OBJECTS = 1 << 16


async def read_body(limits: ServerLimits, request: Request) -> bytes:
    """Return the body of a JSON request. Raises ApiError for another type, a longer body, a client that disconnects."""
    # Only application/json: a browser sends the other types to a foreign site without asking it first (CORS).
    limit, parts, size = limits.body_bytes, list[bytes](), 0
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Clients of Ollama's interface send no type, or that of curl or of JavaScript's fetch. Browsers name the page that
    # sends such a request.
    untyped = ("", "application/x-www-form-urlencoded", "text/plain")
    typed = request.url.path.startswith("/api/") and kind in untyped
    from_page = "origin" in request.headers or "sec-fetch-site" in request.headers
    if kind != "application/json" and (from_page or not typed):
        wrong = f"the body must be application/json, not {kind[:60]!r}"
        missing = "the request has no content-type; it must be application/json"
        raise ApiError(415, wrong if kind else missing, "unsupported_media_type")
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise ApiError(415, f"content-encoding {coding[:60]!r} is not supported", "unsupported_media_type")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > limit:
        raise ApiError(413, f"the body is larger than {limit} bytes", "request_too_large")
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise ApiError(413, f"the body is larger than {limit} bytes", "request_too_large")
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(CLIENT_GONE, "the client has disconnected", "client_gone") from None
    return b"".join(parts)


def parse_body(body: bytes) -> Any:
    """Parse a JSON body. Raises ApiError."""
    # Parsing holds the GIL, and values take up to 20 times the bytes of the body: they are counted first. Commas and
    # brackets inside strings count, too, but no context holds a text with half a million commas.
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_BODY_VALUES:
        raise ApiError(400, f"the body has more than {MAX_BODY_VALUES} values", "too_many_values")
    # Validating an object takes ten times as long as a number, and holds the GIL, too. In strings a quote or a line
    # break after a brace is escaped.
    if body.count(b"{") - body.count(b"{\\") > MAX_BODY_OBJECTS:
        raise ApiError(400, f"the body has more than {MAX_BODY_OBJECTS} objects", "too_many_values")
    try:
        with gc_paused():  # otherwise every few thousand lists are all looked at again
            return strict_json(body)
    except ValueError as error:  # UnicodeDecodeError is one
        raise ApiError(400, f"the body is not valid JSON: {error}", "invalid_json") from None
