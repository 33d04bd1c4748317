"""A request on its way: its body read and bounded, its sequences run, its reply sent whole or as a stream of events.

A client that goes away cancels its sequences. Knows HTTP; of the fields of a protocol it knows only the model's name: a
`Rendering` writes them.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mycli.runtime.server.api_error import ApiError, internal_error
from mycli.runtime.server.delivery import Delivery
from mycli.runtime.server.reply_reader import Piece
from mycli.runtime.server.schemas import ForModel, validated
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.utils.json_fields import strict_json

_T = TypeVar("_T")
_Given = TypeVar("_Given", bound=ForModel)
CLIENT_GONE = 499  # nginx's number; nobody reads it
_PING = b": ping\n\n"


class Rendering(Protocol):
    """How a protocol writes one reply, or the replies of one request."""

    def begin(self) -> Iterable[bytes]:
        """The first events of a stream."""
        ...

    def add(self, piece: Piece) -> Iterable[bytes]:
        """The events of what is new."""
        ...

    def finish(self) -> Iterable[bytes]:
        """The last events, after every reply has ended."""
        ...

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """The events of a stream that fails under way."""
        ...

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any]:
        """All replies at once."""
        ...


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """One piece for each reply, in the order of the replies."""
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.index, []).append(piece)
    return [_joined(found[index]) for index in sorted(found)]


def _joined(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    last = pieces[-1]
    return Piece(
        last.index,
        "".join([piece.content for piece in pieces]),
        "".join([piece.reasoning for piece in pieces]),
        tuple(call for piece in pieces for call in piece.calls),
        sum(piece.tokens for piece in pieces),
        tuple(one for piece in pieces for one in piece.logprobs),
        tuple(one for piece in pieces for one in piece.prompt_logprobs),
        max(piece.cached_tokens for piece in pieces),
        last.end,
        last.stop,
        last.problem,
    )


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event with JSON in it."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {dumps(data)}\n\n".encode()


def dumps(value: Any) -> str:
    """JSON on one line. Half of a surrogate pair cannot come: texts are decoded UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class JsonResponse(Response):
    """An object."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Its bytes."""
        return dumps(content).encode()


async def off_loop(service: Service, work: Callable[[], _T]) -> _T:
    """`work()` in a thread, so that nobody waits for it."""
    return await asyncio.get_running_loop().run_in_executor(service.pool, work)


async def _read_body(service: Service, request: Request) -> bytes:
    """The whole body, which says that it is JSON: a form of another site's page, which a browser sends unasked, cannot.

    Raises ApiError for one that is not, one that is too large, and for a client that leaves before its end.
    """
    limit, parts, size = service.settings.limits.body_bytes, list[bytes](), 0
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the body must be application/json, not {kind[:60]!r}", "unsupported_media_type")
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
        raise ApiError(CLIENT_GONE, "the client has gone", "client_gone") from None
    return b"".join(parts)


def _parsed(body: bytes) -> Any:
    """The JSON of a body. Raises ApiError."""
    try:
        return strict_json(body)
    except ValueError as error:  # UnicodeDecodeError is one
        raise ApiError(400, f"the body is not acceptable JSON: {error}", "invalid_json") from None


async def read_request(
    service: Service, request: Request, kind: type[_Given], work: Callable[[_Given], _T]
) -> tuple[_Given, _T]:
    """What was asked of the served model, as `kind`, and what `work` makes of it off the loop. Raises ApiError."""
    body = await _read_body(service, request)

    def read() -> tuple[_Given, _T]:
        given = validated(kind, _parsed(body))
        service.check_model(given.model)
        return given, work(given)

    return await off_loop(service, read)


def _failure(piece: Piece) -> ApiError | None:
    """The error that a reply ended with."""
    if piece.end == "deadline":
        return ApiError(504, "the request took too long", "timeout")
    if piece.end == "error":
        return ApiError(500, f"the reply failed: {piece.problem}", "generation_failed")
    return None


async def _watch(request: Request, delivery: Delivery) -> None:
    """Tell the delivery when the client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    delivery.fail(ApiError(CLIENT_GONE, "the client has gone", "client_gone"))


@asynccontextmanager
async def running(service: Service, request: Request, prepared: Prepared) -> AsyncIterator[AsyncIterator[list[Piece]]]:
    """Run sequences: pieces as they come, and an empty list when nothing came for a while.

    Whatever ends the block cancels what is left. Raises ApiError: too many wait, a reply failed, the client has gone.
    """
    delivery = Delivery()
    tickets = service.worker.submit(prepared.wanted, delivery)
    watch = asyncio.create_task(_watch(request, delivery))
    try:
        yield _pieces(service, delivery, len(tickets))
    finally:
        watch.cancel()
        service.worker.cancel(tickets)


async def _pieces(service: Service, delivery: Delivery, count: int) -> AsyncIterator[list[Piece]]:
    limits = service.settings.limits
    ended, silent, begun = 0, 0.0, False
    while ended < count:
        try:
            async with asyncio.timeout(limits.ping_seconds):
                found = merged(await delivery.next())
        except TimeoutError:
            silent += limits.ping_seconds
            if not begun and silent >= limits.queue_seconds:
                raise ApiError(504, "no token came in time: the server is busy", "queue_timeout") from None
            yield []
            continue
        begun = True
        for piece in found:
            ended += piece.end is not None
            if (error := _failure(piece)) is not None:
                raise error
        yield found


class EventStream(Response):
    """A reply as server-sent events."""

    def __init__(self, service: Service, request: Request, prepared: Prepared, rendering: Rendering) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._service, self._request, self._prepared, self._rendering = service, request, prepared, rendering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. What goes wrong after the head is an event."""

        async def put(data: Iterable[bytes], more: bool = True) -> None:
            await send({"type": "http.response.body", "body": b"".join(data), "more_body": more})

        async with running(self._service, self._request, self._prepared) as pieces:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await put(self._rendering.begin())
                async for some in pieces:
                    await put([one for piece in some for one in self._rendering.add(piece)] if some else [_PING])
                await put(self._rendering.finish(), more=False)
            except ApiError as error:
                if error.status != CLIENT_GONE:
                    await put(self._rendering.failed(error), more=False)
            except Exception:
                await put(self._rendering.failed(internal_error()), more=False)
                raise


async def answer(
    service: Service, request: Request, prepared: Prepared, rendering: Rendering, stream: bool
) -> Response:
    """The reply to a request, whole or as a stream."""
    if stream:
        return EventStream(service, request, prepared, rendering)
    every: list[Piece] = []
    async with running(service, request, prepared) as pieces:
        async for some in pieces:
            every += some
    return JsonResponse(await off_loop(service, lambda: rendering.whole(merged(every))))
