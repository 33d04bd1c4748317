"""Checks every request before its route and logs it afterwards.

Refuses a foreign Host (DNS rebinding) or Origin (pages of other sites), a missing or wrong key, and new work while the
server drains. The log holds no prompt and no key.
"""

import asyncio
import hmac
import ipaddress
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mycli.runtime.server.http.api_error import ApiError, internal_error, shutting_down
from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.http.keys import ApiKey, KeyShare
from mycli.runtime.server.http.request_log import RequestRecord
from mycli.runtime.server.http.settings import CLIENT_HEADER, SHARE_HEADER, ServerState
from mycli.runtime.tokenizer.prompt_difference import Difference
from mycli.runtime.utils.sanitize import one_line

# Without a key: health probes, and a page without data.
OPEN_PATHS = ("/health", "/v1/health", "/")
PAGE_FILES = "/web/"
_ABSOLUTE = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE)
_PREFIX = re.compile("/+(?:(v1)/+)*")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_CACHE_HEADER = "x-mycli-cache"  # "why" in a request asks for it in the response
_MAX_HEADER = 1000  # characters of the keywords left out of a schema
_SECURITY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


def host_of(value: str) -> str:
    """Return the lower-case host of a Host header or origin, without port and brackets; "" if malformed."""
    host = value.rpartition("://")[2]
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]/@]+))(?::[0-9]{1,5})?", host)
    return (match[1] or match[2] or "").lower().rstrip(".") if match else ""


def _split_target(scope: Scope) -> None:
    # RFC 9112, 3.2.2: the host of an absolute target, which clients send to proxies, takes the place of the header.
    match = _ABSOLUTE.fullmatch(scope.get("raw_path") or b"")
    if match is not None:
        others = [pair for pair in scope["headers"] if pair[0] != b"host"]
        scope["headers"] = [(b"host", match[1]), *others]
        scope["raw_path"] = match[2] or b"/"
        scope["path"] = unquote(scope["raw_path"].decode("ascii"))


def _clean_path(scope: Scope) -> None:
    # Clients add "/v1/..." to base URLs that end in a slash or in /v1: //v1/models, /v1/v1/messages.
    path: str = scope["path"]
    if prefix := _PREFIX.match(path):
        path = ("/v1/" if prefix[1] else "/") + path[prefix.end() :]
    if not path.startswith(PAGE_FILES):  # addresses with a slash at the end; "/v1/models/" names no model
        path = path.rstrip("/") or "/"
    scope["path"] = path


def _preflight(headers: Headers) -> Mapping[str, str]:
    # Every requested header is allowed: SDKs add their own (x-stainless-os and others), and the origin is trusted.
    answers = {
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": headers.get("access-control-request-headers", ""),
        "access-control-max-age": "600",
    }
    # Of pages on the internet that use a server of a local network.
    private = "access-control-request-private-network" in headers
    return answers | ({"access-control-allow-private-network": "true"} if private else {})


def _listed(parts: Sequence[str]) -> str:
    # The value of a header: ASCII, and not longer than clients read.
    text = ", ".join(dict.fromkeys(parts))
    return text.encode("ascii", "replace").decode()[:1024]


def _missed(difference: Difference | None) -> str:
    # The position and cause of a cache miss, without the text: the log never contains prompts.
    if difference is None or difference.continues:
        return ""
    cause = ", ".join(difference.causes) or "another conversation"
    return f"token {difference.tokens} of {difference.second}: {cause}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Guard:
    """The outermost ASGI application; `log` receives one line per request."""

    def __init__(self, app: ASGIApp, server: ServerState, log: Callable[[str], None]) -> None:
        self._app, self._server, self._log = app, server, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, arrived = time.perf_counter(), datetime.now().astimezone()
        _split_target(scope)
        _clean_path(scope)
        headers = Headers(scope=scope)
        sent = headers.get("x-request-id", "")
        request_id = sent if _REQUEST_ID.fullmatch(sent) else f"req_{secrets.token_hex(12)}"
        state = scope["state"]
        state["request_id"] = request_id
        status, started = 0, False
        counted = scope["method"] == "POST"
        self._server.requests += counted
        # A client that waits for 100 Continue may send no body after another response: the next request would be read
        # as the body of this one.
        waits = headers.get("expect", "").lower() == "100-continue"

        async def read() -> Message:
            nonlocal waits
            waits = False
            return await receive()

        async def reply(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                self._add_headers(MutableHeaders(scope=message), state, headers)
                if waits:
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        try:
            await self._answer(scope, headers, read, reply)
        except ApiError as error:
            await self._refuse(error, scope, receive, reply)
        except asyncio.CancelledError:  # the grace period is over
            if not started:
                await self._refuse(shutting_down(), scope, receive, reply)
        except Exception as error:
            self._log(f"{request_id} {type(error).__name__}: {one_line(str(error))}")
            if started:
                raise
            await self._refuse(internal_error(), scope, receive, reply)
        finally:
            self._server.requests -= counted
            if not state.get("forwarded"):  # the server that answered it has logged it, with its figures
                self._log_request(scope, headers, status, arrived, time.perf_counter() - began)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, reply: Send) -> None:
        self._check_source(scope, headers)
        if scope["method"] == "OPTIONS" and "origin" in headers:  # a CORS preflight, which carries no key
            await Response(status_code=204, headers=_preflight(headers))(scope, receive, reply)
            return
        key = self._check(scope, headers)
        scope["state"]["share"] = self._share(key, headers)
        with self._server.keys.counted(key) if key is not None and scope["method"] == "POST" else nullcontext():
            await self._app(scope, receive, reply)

    def _log_request(self, scope: Scope, headers: Headers, status: int, arrived: datetime, seconds: float) -> None:
        state = scope["state"]
        record = RequestRecord(
            arrived,
            self._client(scope, headers),
            state["request_id"],
            scope["method"],
            one_line(scope["path"], 100),
            self._server.name,
            status,
            seconds,
            state.get("figures"),
            state.get("omitted", ()),
            state["share"].name if "share" in state else "",
            _missed(state.get("difference")),
        )
        self._log(record.line(self._server.settings.log_format))

    def _add_headers(self, answer: MutableHeaders, state: Mapping[str, Any], headers: Headers) -> None:
        """Add the headers of every response to `answer`; headers: those of the request."""
        request_id = state["request_id"]
        ids = {"x-request-id": request_id, "request-id": request_id}  # OpenAI's header and Anthropic's
        omitted = {"x-mycli-omitted": _listed(state["omitted"])} if state.get("omitted") else {}
        loosened = one_line(", ".join(state.get("loosened", ())), _MAX_HEADER)
        if loosened:
            answer["x-mycli-loosened"] = loosened.encode("ascii", "backslashreplace").decode()
            self._log(f"{request_id} left out of the schema: {loosened}")
        difference: Difference | None = state.get("difference")
        if difference is not None and headers.get(_CACHE_HEADER) == "why":
            # ASCII: other characters are escaped. The text of the earlier prompt may be another client's.
            fields = {name: value for name, value in difference.fields().items() if name != "earlier"}
            answer[_CACHE_HEADER] = json.dumps(fields)
        for name, value in {**_SECURITY, **ids, **omitted, **self._cors(headers)}.items():
            answer.setdefault(name, value)

    def _client(self, scope: Scope, headers: Headers) -> str:
        if self._server.settings.supervised:
            return one_line(headers.get(CLIENT_HEADER, ""), 100)
        return scope["client"][0] if scope["client"] else ""

    @staticmethod
    async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        body = error.envelope(scope["path"], scope["state"].get("request_id", ""))
        response = JsonResponse(body, error.status, headers=error.headers)
        await response(scope, receive, send)

    def _check_source(self, scope: Scope, headers: Headers) -> None:
        limits = self._server.settings.limits
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if len(scope["headers"]) > limits.headers or size > limits.header_bytes:
            message = f"more than {limits.headers} headers, or {limits.header_bytes} bytes in them"
            raise ApiError(431, message, "headers_too_large")
        if "content-length" in headers and "transfer-encoding" in headers:
            # Request smuggling: a proxy in front may end the body at the other one.
            close = {"connection": "close"}
            message = "content-length and transfer-encoding exclude each other"
            raise ApiError(400, message, "invalid_request", headers=close)
        self._check_host(scope, headers)
        self._check_origin(scope, headers)

    def _check(self, scope: Scope, headers: Headers) -> ApiKey | None:
        # Return the key of a request if the server has a file of keys.
        path = scope["path"]
        key = None if path in OPEN_PATHS or path.startswith(PAGE_FILES) else self._check_key(headers)
        if scope["method"] == "POST" and self._server.draining:
            raise shutting_down()
        return key

    def _share(self, key: ApiKey | None, headers: Headers) -> KeyShare:
        if self._server.settings.supervised:
            return KeyShare.decode(headers.get(SHARE_HEADER, ""))
        return KeyShare() if key is None else key.share

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        # DNS rebinding: a page whose host name was pointed at this machine still sends that name.
        hosts = headers.getlist("host")
        if not hosts and scope["http_version"] == "1.0":  # as HAProxy's health checks; browsers always name a host
            return
        host = host_of(hosts[0]) if len(hosts) == 1 and "://" not in hosts[0] else ""
        known = host == "localhost" or host.endswith(".localhost") or host in self._server.settings.hosts
        if not known and not _is_address(host):
            message = f"host {host[:100]!r} is none of those that the server was started with"
            raise ApiError(403, message, "host_not_allowed")

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or origin in self._server.settings.origins:
            return
        host = headers.get("host", "")
        if origin not in (f"{scope['scheme']}://{host}", f"https://{host}"):  # a reverse proxy may have ended TLS
            message = f"origin {origin[:100]!r} is none of those that the server was started with"
            raise ApiError(403, message, "origin_not_allowed")

    def _check_key(self, headers: Headers) -> ApiKey | None:
        single, keys = self._server.settings.key, self._server.keys
        if single is None and not keys:
            return None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        sent = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        key = keys.find(sent.encode("latin-1"))
        if key is None and (single is None or not hmac.compare_digest(sent.encode("latin-1"), single)):
            message = "wrong API key" if sent else "API key missing: send Authorization: Bearer KEY, or x-api-key"
            raise ApiError(401, message, "invalid_api_key", headers={"www-authenticate": "Bearer"})
        return key

    def _cors(self, headers: Headers) -> Mapping[str, str]:
        origin = headers.get("origin")
        if origin is None or origin not in self._server.settings.origins:
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": (
                "x-request-id, request-id, x-mycli-omitted, x-mycli-loosened, x-mycli-cache"
            ),
            "vary": "origin",
            "cross-origin-resource-policy": "cross-origin",
        }
