"""Reads a request's body, runs its sequences, and sends the reply whole or as server-sent events.

A client that disconnects cancels its sequences. A `Rendering` writes the fields of each interface.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mycli.runtime.engine.replies.reader import Piece, join_parts
from mycli.runtime.server.delivery import Delivery
from mycli.runtime.server.http.api_error import ApiError, internal_error
from mycli.runtime.server.http.body import CLIENT_GONE, parse_body, read_body
from mycli.runtime.server.http.encoding import JsonResponse
from mycli.runtime.server.http.keys import KeyShare
from mycli.runtime.server.http.request_log import RequestFigures
from mycli.runtime.server.recording import ReplyIds, ReplyRecorder, Requests, Resumption, Work
from mycli.runtime.server.requests.fields import check_fields, unread_parts
from mycli.runtime.server.requests.schemas import ForModel, ForReply, validated
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.server.worker import Ticket

_T = TypeVar("_T")
_Body = TypeVar("_Body", bound=ForModel)
_ReplyBody = TypeVar("_ReplyBody", bound=ForReply)
LARGE_BODY = 1 << 18  # bytes; a conversation of 65,536 tokens is as long


class Rendering(Protocol):
    """How an interface writes the replies to one request."""

    def begin(self) -> Iterable[bytes]:
        """Return the first events of a stream."""
        ...

    def add(self, piece: Piece) -> Iterable[bytes]:
        """Return the events of one more piece."""
        ...

    def keep_alive(self) -> Iterable[bytes]:
        """Return the events that keep a silent stream alive. Not comments: they do not reset the timeout of clients."""
        ...

    def finish(self) -> Iterable[bytes]:
        """Return the last events, after every reply has ended."""
        ...

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Return the events that end a stream which has failed."""
        ...

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the body of a response that is not streamed."""
        ...


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Join the pieces of each reply into one, in the order of the replies."""
    by_reply: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_reply.setdefault(piece.index, []).append(piece)
    return [_join(by_reply[index]) for index in sorted(by_reply)]


def _join(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    last = pieces[-1]
    return replace(
        last,
        parts=join_parts(part for piece in pieces for part in piece.parts),
        reasoning="".join([piece.reasoning for piece in pieces]),
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        prompt_logprobs=tuple(logprob for piece in pieces for logprob in piece.prompt_logprobs),
        cached_tokens=max(piece.cached_tokens for piece in pieces),
        reasoning_tokens=sum(piece.reasoning_tokens for piece in pieces),
        prompt_tokens=max(piece.prompt_tokens for piece in pieces),
        text_logprobs=tuple(entry for piece in pieces for entry in piece.text_logprobs),
    )


async def off_loop(service: Service, work: Callable[[], _T], body_bytes: int = 0) -> _T:
    """Run `work` in a thread pool, so that the event loop serves others meanwhile; large bodies have their own."""

    def guarded() -> _T:
        try:
            return work()
        except Exception:
            raise
        except BaseException as error:  # a Rust panic, which asyncio and starlette do not handle
            raise RuntimeError(f"{type(error).__name__}: {error}") from None

    pool = service.large_bodies if body_bytes > LARGE_BODY else service.pool
    return await asyncio.get_running_loop().run_in_executor(pool, guarded)


async def read_request(
    service: Service, request: Request, kind: type[_Body], work: Callable[[_Body], _T]
) -> tuple[_Body, _T]:
    """Read the body as a `kind`; return it and `work(body)`, which runs off the event loop. Raises ApiError."""
    _, body, result = await _read_request(service, request, kind, work)
    return body, result


async def _read_request(
    service: Service, request: Request, kind: type[_Body], work: Callable[[_Body], _T]
) -> tuple[dict[str, Any], _Body, _T]:
    data = await read_body(service.settings.limits, request)

    def read() -> tuple[list[str], dict[str, Any], _Body, _T]:
        values = parse_body(data)
        body = validated(kind, values)
        unknown = check_fields(values, kind.model_fields) + unread_parts(body, values)
        service.check_model(body.model)
        return unknown, values, body, work(body)

    unknown, values, body, result = await off_loop(service, read, len(data))
    note_omitted(request, [f"field {name}" for name in unknown])
    request.scope["state"]["batch"] = body.service_tier == "flex"
    return values, body, result


def note_omitted(request: Request, parts: Sequence[str]) -> None:
    """Note parts of a request that were left out: the guard names them in a header and in the log."""
    request.scope["state"].setdefault("omitted", []).extend(parts)


def _failure(piece: Piece) -> ApiError | None:
    if piece.end == "deadline":
        return ApiError(504, "the request took too long", "timeout")
    if piece.end == "error":
        status = 400 if piece.refused else 500
        return ApiError(status, f"the reply failed: {piece.problem}", "generation_failed")
    return None


async def _watch(request: Request, delivery: Delivery) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    delivery.fail(ApiError(CLIENT_GONE, "the client has disconnected", "client_gone"))


Begin = Callable[[Requests], Work]


@asynccontextmanager
async def running(
    service: Service, request: Request, prepared: Prepared, begin: Begin | None = None
) -> AsyncIterator[AsyncIterator[list[Piece]]]:
    """Run sequences and yield their pieces; an empty list after `ping_seconds` without any.

    begin: returns the requests that are left to run; None for all. Leaving the block cancels running sequences. Raises
    ApiError: queue full, reply failed, client disconnected.
    """
    delivery, work = Delivery(), Work(())
    figures = prepared.figures
    figures.prompt = prepared.prompt_tokens
    request.scope["state"]["figures"] = figures
    tickets: Sequence[Ticket] = ()
    watch = asyncio.create_task(_watch(request, delivery))
    try:
        for grammar in prepared.grammars:
            await service.grammars.compile(grammar, watch)
        share: KeyShare = request.scope["state"].get("share", KeyShare())
        batch = share.batch or bool(request.scope["state"].get("batch"))
        shared = [
            (replace(item, user=share.name, weight=share.weight, batch=batch), readers)
            for item, readers in prepared.requests
        ]
        work = Work(shared) if begin is None else await off_loop(service, lambda: begin(shared))
        if work.writer is not None:
            service.recorded[work.writer.path.stem] = delivery
        if work.pieces:
            delivery.put(merged(work.pieces))
        if work.requests:
            tickets = service.worker.submit(work.requests, delivery, work.records)
        yield _pieces(service, delivery, prepared, work)
    finally:
        watch.cancel()
        service.worker.cancel(tickets)
        work.close(submitted=bool(tickets))
        if work.writer is not None:
            service.recorded.pop(work.writer.path.stem, None)
        _add_times(figures, tickets)
        service.worker.metrics.used(request.scope["state"].get("share", KeyShare()).name, figures)


def _add_times(figures: RequestFigures, tickets: Sequence[Ticket]) -> None:
    begun = [(ticket, ticket.first, ticket.last) for ticket in tickets]
    firsts = [first - ticket.submitted for ticket, first, _ in begun if first is not None]
    spans = [
        (last - first) / (ticket.tokens - 1)
        for ticket, first, last in begun
        if first is not None and last is not None and ticket.tokens > 1
    ]
    figures.ttft = min(firsts, default=None)
    figures.tpot = sum(spans) / len(spans) if spans else None


async def _pieces(service: Service, delivery: Delivery, prepared: Prepared, work: Work) -> AsyncIterator[list[Piece]]:
    limits, figures, count = service.settings.limits, prepared.figures, prepared.replies
    ended, silent, started = 0, 0.0, False
    while ended < count:
        try:
            async with asyncio.timeout(limits.ping_seconds):
                pieces = [work.leave_out.apply(piece) for piece in merged(await delivery.next())]
        except TimeoutError:
            silent += limits.ping_seconds
            if not started and silent >= limits.queue_seconds:
                message = f"no token within {limits.queue_seconds:g} s: the server is busy"
                raise ApiError(504, message, "queue_timeout") from None
            yield []
            continue
        started = True
        for piece in pieces:
            ended += piece.end is not None
            figures.completion += len(piece.tokens)
            figures.add_cached(prepared.prompt_of(piece.index), piece.cached_tokens)
            if (error := _failure(piece)) is not None:
                raise error
        yield pieces


class EventStream(Response):
    """A reply as a stream of events. An error after the head is sent as an event."""

    def __init__(
        self,
        service: Service,
        request: Request,
        prepared: Prepared,
        rendering: Rendering,
        media_type: str,
        begin: Begin | None,
    ) -> None:
        super().__init__(media_type=media_type, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._service, self._prepared, self._rendering = service, prepared, rendering
        self._request, self._begin = request, begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(data: Iterable[bytes], more: bool = True) -> None:
            await send({"type": "http.response.body", "body": b"".join(data), "more_body": more})

        async with running(self._service, self._request, self._prepared, self._begin) as pieces:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await put(self._rendering.begin())
                sent = time.monotonic()
                async for batch in pieces:
                    events = [data for piece in batch for data in self._rendering.add(piece)]
                    # A call whose arguments are not JSON is sent when it is complete, which may take minutes.
                    silent = time.monotonic() - sent >= self._service.settings.limits.ping_seconds
                    if not batch or (silent and not events):
                        events = list(self._rendering.keep_alive())
                    sent = time.monotonic() if events else sent
                    await put(events)
                await put(self._rendering.finish(), more=False)
            except ApiError as error:
                if error.status != CLIENT_GONE:
                    await put(self._rendering.failed(error), more=False)
            except Exception:
                await put(self._rendering.failed(internal_error()), more=False)
                raise


@dataclass(frozen=True)
class Interface(Generic[_ReplyBody]):
    """A route that replies: its name in records, the prefix of its ids, its body, and how it reads and writes."""

    name: str
    prefix: str
    body: type[_ReplyBody]
    prepare: Callable[[Service, _ReplyBody], Prepared]
    rendering: Callable[[Service, Prepared, _ReplyBody, ReplyIds], Rendering]

    async def reply(self, service: Service, request: Request) -> Response:
        """Read a request and reply to it."""
        values, body, prepared = await _read_request(
            service, request, self.body, lambda body: self.prepare(service, body)
        )
        ids, begin = ReplyIds.random(self.prefix), None
        if service.journal is not None:
            begin = ReplyRecorder(service.journal, ids, self.name, values, service.loaded.fingerprint).begin
        rendering = self.rendering(service, prepared, body, ids)
        return await answer(service, request, prepared, rendering, body.stream, begin=begin)

    async def resume(self, service: Service, request: Request, resumption: Resumption, stream: bool | None) -> Response:
        """Reply to a recorded request; the recorded part of the replies comes first."""
        values = resumption.header["body"]

        def prepare() -> tuple[_ReplyBody, Prepared]:
            body = validated(self.body, values)
            return body, self.prepare(service, body)

        body, prepared = await off_loop(service, prepare)
        rendering = self.rendering(service, prepared, body, ReplyIds(resumption.name, resumption.header["created"]))
        stream = body.stream if stream is None else stream
        begin = partial(resumption.begin, shows_reasoning=body.shows_reasoning)
        return await answer(service, request, prepared, rendering, stream, begin=begin)


async def answer(
    service: Service,
    request: Request,
    prepared: Prepared,
    rendering: Rendering,
    stream: bool | None,
    media_type: str = "text/event-stream",
    begin: Begin | None = None,
) -> Response:
    """Return the reply to a request, whole or as a stream of `media_type`."""
    note_omitted(request, prepared.omitted)
    request.state.difference = prepared.difference
    request.state.loosened = [path for grammar in prepared.grammars for path in grammar.loosened]
    if stream:
        return EventStream(service, request, prepared, rendering, media_type, begin)
    received: list[Piece] = []
    async with running(service, request, prepared, begin) as pieces:
        async for batch in pieces:
            received += batch
    return JsonResponse(await off_loop(service, lambda: rendering.whole(merged(received))))
