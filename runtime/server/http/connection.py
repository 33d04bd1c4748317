"""Connections with deadlines and a server that shuts down gracefully.

uvicorn has no deadline for the head or body of a request, no limit on connections, and stops accepting while it drains.
"""

import asyncio
import errno
import os
import resource
import shutil
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Literal, cast

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from mycli.runtime.errors import ResourceError, UsageError
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.encoding import dumps
from mycli.runtime.server.http.lingering import ClientProbe, LingeringTransport
from mycli.runtime.server.http.settings import ServerLimits

_LINGER = 1.0  # seconds to let a refused client read the answer
_DEAD_SECONDS = 5.0  # to send what is under way when the engine has died
_OPEN_FILES = 8192
_READ_BYTES = 48 << 10  # that a client reads in `stall_seconds`: what takes asyncio's buffer from full to resumed
_SLICE = 1 << 14  # bytes that are parsed before the chunks in them are counted
# Each chunk of a body takes some 20 us, however small it is: a body of single bytes would hold up all connections.
_FREE_CHUNKS, _CHUNK_BYTES = 1 << 12, 64
DRAIN_TICK = 0.1  # seconds between two calls of uvicorn's on_tick
_BUSY = ApiError(503, "too many connections", "too_many_connections", headers={"retry-after": "5"})
_LATE = ApiError(408, "the request took too long to arrive", "timeout")
_SMALL_CHUNKS = ApiError(400, "the chunks of the body are too small", "small_chunks")
_INVALID = ApiError(400, "the request is not valid HTTP", "invalid_http")


def _response(error: ApiError) -> bytes:
    """Return the whole response to a request that no application sees."""
    headers = {"content-type": "application/json", **error.headers, "connection": "close"}
    head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *map(": ".join, headers.items())]
    return "\r\n".join([*head, "", dumps({"error": error.fields()})]).encode()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes any free one. Raises ResourceError or UsageError."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot resolve host {host[:100]}: {error}", code="choose-host") from None
    family, kind, protocol, _, address = addresses[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _unavailable(f"{host}:{port}", error) from None
    return listener


def listen_unix(path: Path, group: str | None = None) -> socket.socket:
    """Return a socket that listens at `path` for this user, and for `group`. Raises ResourceError or UsageError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()  # left by a server that was killed
        before = os.umask(0o177)  # between bind and chmod others could connect
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if "too long" in str(error):
            raise UsageError(f"{path}: the path of a socket may have about 100 bytes", "use a shorter path") from None
        raise _unavailable(str(path), error) from None
    if group is not None:
        try:
            shutil.chown(path, group=group)
            path.chmod(0o660)
        except (LookupError, OSError) as error:
            listener.close()
            path.unlink()
            cause = "no such group" if isinstance(error, LookupError) else error.strerror
            raise UsageError(f"cannot open {path} to group {group}: {cause}", "name a group of this user") from None
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def _unavailable(address: str, error: OSError) -> ResourceError:
    if error.errno == errno.EADDRINUSE:
        return ResourceError(f"{address} is in use", code="choose-port")
    if error.errno == errno.EACCES:
        return ResourceError(f"{address}: permission denied", code="choose-high-port")
    if error.errno == errno.EADDRNOTAVAIL:
        return ResourceError(f"{address} is not an address of this machine", code="choose-host")
    return ResourceError(f"cannot listen on {address}: {error.strerror}", code="choose-host")


def connection(limits: ServerLimits) -> type[H11Protocol]:
    """Return a connection class with `limits`: uvicorn creates the instances."""
    return type("Connection", (_Connection,), {"limits": limits})


class _StrictBuffer(ReceiveBuffer):
    # h11 accepts lines that end with a bare line feed, where a proxy in front may see no end: request smuggling.

    def maybe_extract_lines(self) -> list[bytearray] | None:
        before = bytes(self)
        lines = super().maybe_extract_lines()
        if lines is not None:
            head = before[: len(before) - len(self)]
            if head.count(b"\n") != head.count(b"\r\n"):
                raise h11.LocalProtocolError("a line ends with a bare line feed")
        return lines


class _Connection(H11Protocol):
    limits: ServerLimits
    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _expected: Literal["head", "body", ""] = ""
    _opened = 0.0
    _body_bytes = 0
    _chunks = 0
    _lingering: LingeringTransport
    _probe: ClientProbe | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        if len(self.connections) >= self.limits.connections and not self._close_oldest_idle():
            transport.write(_response(_BUSY))
            if transport.can_write_eof():
                transport.write_eof()
            # Closing now would reset the connection: the client's request is still on its way, and unread.
            self.loop.call_later(_LINGER, transport.close)
            return
        seconds, nbytes = self.limits.body_seconds, self.limits.body_bytes
        self._lingering = LingeringTransport(transport, self._is_unread, seconds, nbytes)
        super().connection_made(cast(asyncio.Transport, self._lingering))
        self.conn._receive_buffer = _StrictBuffer()
        self._opened = self.loop.time()
        self._expect("head")

    def _close_oldest_idle(self) -> bool:
        # Idle sockets of one client must not keep out others, such as a health probe.
        idle = [peer for peer in self.connections if isinstance(peer, _Connection) and peer.is_idle]
        if not idle:
            return False
        oldest = min(idle, key=lambda peer: peer._opened)
        self.connections.discard(oldest)
        oldest.transport.close()
        return True

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read or answered."""
        return self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE

    def data_received(self, data: bytes) -> None:
        if self.transport is None:
            return
        answered = self.transport.is_closing() or (self.cycle is not None and self.cycle.response_complete)
        if answered and self._is_unread():
            self._lingering.discard(len(data))
        for start in range(0, len(data), _SLICE):
            if self.transport.is_closing():
                return
            part = data[start : start + _SLICE]
            super().data_received(part)
            if self._has_small_chunks(part):
                self._refuse(_SMALL_CHUNKS)
                return
        # A deadline is for the whole head or body: a byte now and then does not extend it.
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._expect("body")
        elif state is h11.IDLE and self.conn.our_state is h11.IDLE:
            self._expect("head")
        else:
            self._expect("")

    def _is_unread(self) -> bool:
        # Whether the client may still be sending a request that nothing reads. After an end of file it is not.
        return self._probe is None and self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    @property
    def _awaits_response(self) -> bool:
        waits = self.cycle is not None and not self.cycle.response_complete
        return waits and self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's returns None: the connection is closed
        if self.transport is None or self.transport.is_closing() or not self._awaits_response:
            return False
        if self.scope["http_version"] == "1.0":  # it has no interim responses: its clients count as gone
            return False
        self._probe = self._probe or ClientProbe(self.transport, self.conn)
        return True

    def _has_small_chunks(self, part: bytes) -> bool:
        if self.conn.their_state is not h11.SEND_BODY:
            self._body_bytes = self._chunks = 0
        elif (b"transfer-encoding", b"chunked") in self.headers:
            self._body_bytes += len(part)
            self._chunks += part.count(b"\r\n") // 2
        return self._chunks > _FREE_CHUNKS and self._body_bytes < self._chunks * _CHUNK_BYTES

    def _expect(self, part: Literal["head", "body", ""]) -> None:
        if part == self._expected:
            return
        self._expected = part
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        seconds = {"head": self.limits.header_seconds, "body": self.limits.body_seconds}.get(part)
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self.transport is not None:
            self._lingering.seconds = _LINGER  # it has had its time
            self._refuse(_LATE)

    def _refuse(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_response(error))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # its endpoint, if it has begun, must not respond as well
            self.cycle.message_event.set()
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        # uvicorn's fails if a response has begun, for instance when the body that was refused turns out to be invalid.
        self._refuse(_INVALID)

    def on_response_complete(self) -> None:
        # uvicorn closes connections that are idle between two requests (`idle_seconds`).
        self._expect("")
        self._lingering.discarded = 0  # of an earlier request
        super().on_response_complete()
        if self._probe is not None and not self._awaits_response:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def _watch_reader(self, unsent: int) -> None:
        self._stall = self.loop.call_later(self.limits.stall_seconds, self._drop_if_stalled, unsent)

    def _drop_if_stalled(self, before: int) -> None:
        # The buffer may hold a whole response, for which a slow client needs longer than `stall_seconds`.
        unsent = self.transport.get_write_buffer_size()
        if before - unsent < _READ_BYTES:
            self.transport.abort()
        else:
            self._watch_reader(unsent)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._stall):
            if timer is not None:
                timer.cancel()
        if self.transport is not None:
            self._lingering.lost()
            super().connection_lost(exc)


class DrainingServer(uvicorn.Server):
    """Shuts down gracefully: the first signal calls `drain` and waits while `busy()`; a second one stops immediately.

    `give_up` is called if replies take longer than the grace period. Connections are still accepted meanwhile, so that
    health probes get an answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: ServerLimits,
        drain: Callable[[], None],
        busy: Callable[[], bool],
        give_up: Callable[[], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=connection(limits),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=limits.idle_seconds,
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=limits.header_bytes,
            )
        )
        self._limits, self._drain, self._busy, self._give_up = limits, drain, busy, give_up
        self._draining_for: float | None = None
        self._dead_for: float | None = None

    def end(self) -> None:
        """Stop serving, from any thread, as soon as the responses under way are sent."""
        self._dead_for = 0.0

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Treat SIGHUP, when a terminal closes, as the signals that uvicorn handles, unless nohup ignores it."""
        before = signal.getsignal(signal.SIGHUP)
        with super().capture_signals():
            if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
                yield
                return
            signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:  # before uvicorn raises the signal again
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._captured_signals = [sig]  # uvicorn raises it again at the end, which gives the exit code
        if self._draining_for is not None:
            self.should_exit = self.force_exit = True
        else:
            self._draining_for = 0.0
            self._drain()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.force_exit:
            # The streams end as if their clients had gone. uvicorn would cancel them, and log an error for each.
            for peer in list(self.server_state.connections):
                peer.transport.abort()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if self._dead_for is not None:
            self.should_exit |= not self._busy() or self._dead_for >= _DEAD_SECONDS
            self._dead_for += DRAIN_TICK
        if self._draining_for is not None:
            if not self._busy():
                self.should_exit = True
            elif self._draining_for >= self._limits.grace_seconds:
                self._give_up()
                self.should_exit = True
            self._draining_for += DRAIN_TICK
        return await super().on_tick(counter)


def run_until_signal(
    server: DrainingServer,
    listener: socket.socket,
    ready: Callable[[], None],
    close: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve until a signal; `ready` is called once requests are accepted, `close` when all are answered."""
    # Many systems allow 1,024 open files by default, fewer than connections and the files of a model together.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES if hard < 0 else min(_OPEN_FILES, hard), hard))

    async def serve() -> None:
        announced = asyncio.create_task(_call_when_started(server, ready))
        try:
            await server.serve([listener])
        finally:
            announced.cancel()
            if close is not None:
                await close()

    with suppress(asyncio.CancelledError):
        asyncio.run(serve())


async def _call_when_started(server: DrainingServer, ready: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    ready()
