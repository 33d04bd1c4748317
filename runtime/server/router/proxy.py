"""Forwards a request to the process of its model, and streams the response back."""

import asyncio
import json
from collections.abc import Mapping

import httpx2
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mycli.runtime.server.http.api_error import ApiError, invalid_value
from mycli.runtime.server.http.body import CLIENT_GONE
from mycli.runtime.server.http.encoding import dumps, event
from mycli.runtime.server.http.settings import CLIENT_HEADER, SHARE_HEADER
from mycli.runtime.server.ollama.keep_alive import keep_alive_seconds
from mycli.runtime.server.router.pool import ModelPool, Slot

# Headers of the connection to the client, and those that were checked here: the process has no key and another address.
_NOT_FORWARDED = frozenset(
    (
        "host",
        "connection",
        "keep-alive",
        "proxy-connection",
        "transfer-encoding",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "content-length",
        "origin",
        "authorization",
        "x-api-key",
        "proxy-authorization",
    )
)
_NOT_RETURNED = frozenset(("connection", "keep-alive", "transfer-encoding", "date", "server"))


class ForwardedResponse(Response):
    """The response of a model's process to `body`. If the client disconnects, the request is cancelled there, too.

    keep: a tuple of the seconds that the model stays loaded after this request, None for ever; empty: unchanged.
    """

    def __init__(
        self, pool: ModelPool, slot: Slot, request: Request, body: bytes, keep: tuple[float | None] | tuple[()] = ()
    ) -> None:
        super().__init__()
        self._pool, self._slot, self._request, self._body, self._keep = pool, slot, request, body, keep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(_disconnected(receive))
        work = asyncio.create_task(self._forward(send))
        try:
            await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ApiError(CLIENT_GONE, "the client has disconnected", "client_gone")
            work.result()
        finally:
            watch.cancel()
            work.cancel()
            await asyncio.wait({work})  # until it has released the model

    async def _forward(self, send: Send) -> None:
        started, events = False, EventCount()
        async with self._pool.use(self._slot) as process:
            if self._keep:
                (self._slot.idle,) = self._keep
            try:
                async with process.client.stream(
                    self._request.method, self._url(), content=self._body, headers=self._forwarded_headers()
                ) as answer:
                    self._request.scope["state"]["forwarded"] = True  # the guard leaves the log line to that process
                    # A reply with a length is read whole before the head is sent, so that a process that dies meanwhile
                    # still gives status 502 and not a truncated body with status 200.
                    whole = await answer.aread() if "content-length" in answer.headers else None
                    head = [pair for pair in answer.headers.raw if pair[0].decode().lower() not in _NOT_RETURNED]
                    started = True
                    await send({"type": "http.response.start", "status": answer.status_code, "headers": head})
                    if whole is None:
                        async for part in answer.aiter_raw():
                            events.add(part)
                            await send({"type": "http.response.body", "body": part, "more_body": True})
                    await send({"type": "http.response.body", "body": whole or b""})
                    return
            except httpx2.TransportError:
                pass
            # The connection breaks before the exit code is known, and the message should contain it.
            await asyncio.wait({ended := asyncio.ensure_future(process.ended())}, timeout=1)
            ended.cancel()
            error = ApiError(502, f"{self._slot.model.name} failed: {process.exit_reason}", "model_process_ended")
        if not started:
            raise error
        # The status is sent already: the stream ends with an error event, which clients report.
        body = stream_failure(self._request.url.path, error, events.count)
        await send({"type": "http.response.body", "body": body})

    def _url(self) -> str:
        query = self._request.url.query
        return self._request.url.path + (f"?{query}" if query else "")

    def _forwarded_headers(self) -> Mapping[str, str]:
        headers = {name: value for name, value in self._request.headers.items() if name not in _NOT_FORWARDED}
        client = self._request.client
        return {
            **headers,
            "x-request-id": self._request.scope["state"]["request_id"],
            SHARE_HEADER: self._request.scope["state"]["share"].encode(),
            CLIENT_HEADER: "" if client is None else client.host,
        }


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventCount:
    """Counts the server-sent events in the parts of a stream."""

    def __init__(self) -> None:
        self.count = 0
        self._last = b""

    def add(self, part: bytes) -> None:
        """Count the events that end in the next part, whose JSON has no line feeds."""
        self.count += (self._last + part).count(b"\n\n")
        self._last = part[-1:]


def stream_failure(path: str, error: ApiError, events: int) -> bytes:
    """Return the last bytes of a stream that failed after `events`, in the format of the interface of `path`."""
    if path.startswith("/api/"):
        return (dumps({"error": error.message}) + "\n").encode()
    if path.startswith("/v1/messages"):
        return event({"type": "error", "error": error.fields()}, "error")
    if path.endswith("/responses"):
        fields = error.fields()
        named = {key: fields[key] for key in ("code", "message", "param")}
        return event({"type": "error", "sequence_number": events, **named}, "error")
    return event({"error": error.fields()}) + b"data: [DONE]\n\n"


def model_of(values: object) -> str | None:
    """Return the model that a parsed body names. Raises ApiError if the field is not a name."""
    if not isinstance(values, dict):
        raise ApiError(400, f"the body must be an object, not {type(values).__name__}", "invalid_type")
    name = values.get("model", values.get("name") if "model" not in values else None)
    if name is not None and not isinstance(name, str):
        raise invalid_value("model", "must be a string")
    return name


def keep_alive_of(values: object) -> tuple[float | None] | tuple[()]:
    """Return the argument `keep` of `ForwardedResponse` for a body of Ollama's interface."""
    value = values.get("keep_alive") if isinstance(values, dict) else None
    if value is None:
        return ()
    try:
        return (keep_alive_seconds(value),)
    except ValueError:
        return ()  # refused by the model's process, with the message of that interface


def relabelled(document: bytes, names: list[str]) -> bytes:
    """Return the OpenAPI description of one model's server with the names of all models."""
    value = json.loads(document)
    value["info"]["title"] = "mycli"
    for schema in value["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": [*names, None]}
    return dumps(value).encode()
