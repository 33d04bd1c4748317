"""Sockets: what a client may do to one, and a server that ends in order.

uvicorn gives no deadline to a request's head or body, no bound on connections and no way to answer while it drains;
here they are. Does not know what is served.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from mycli.runtime.errors import ResourceError, UsageError
from mycli.runtime.server.settings import ServerLimits

DRAIN_TICK = 0.1  # seconds
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"too many connections","type":"overloaded_error","param":null,"code":"too_many_connections"}}'
)
_LATE = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"the request took too long to arrive","type":"timeout_error","param":null,"code":"timeout"}}'
)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at `host` and `port` (0: any free one). Raises ResourceError or UsageError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{host[:100]}: not an address: {error}", code="choose-host") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _unavailable(f"{host}:{port}", error) from None
    return listener


def _unavailable(place: str, error: OSError) -> ResourceError:
    if error.errno == errno.EADDRINUSE:
        return ResourceError(f"{place} is in use", code="choose-port")
    if error.errno == errno.EACCES:
        return ResourceError(f"{place} may not be used by this user", code="choose-high-port")
    if error.errno == errno.EADDRNOTAVAIL:
        return ResourceError(f"{place} is not an address of this machine", code="choose-host")
    return ResourceError(f"{place} cannot be listened on: {error.strerror}", code="choose-host")


def connection(limits: ServerLimits) -> type[H11Protocol]:
    """The class of connections that are held to `limits`."""

    class Connection(_Connection):
        """With these limits."""

    Connection.limits = limits
    return Connection


class _Connection(H11Protocol):
    limits: ServerLimits
    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _waits_for: str = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Refuse what is one too many, and give the first head its deadline."""
        if len(self.connections) >= self.limits.connections:
            transport.write(_BUSY)
            transport.close()
            return
        super().connection_made(transport)
        self._expect("head")

    def data_received(self, data: bytes) -> None:
        """Keep the deadline of whatever is under way: a byte now and then does not extend it."""
        if self.transport is None:
            return
        super().data_received(data)
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._expect("body")
        elif state is h11.IDLE and self.conn.our_state is h11.IDLE:
            self._expect("head")
        else:
            self._expect("")

    def _expect(self, what: str) -> None:
        if what == self._waits_for:
            return
        self._waits_for = what
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        seconds = {"head": self.limits.header_seconds, "body": self.limits.body_seconds}.get(what)
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_LATE)
        self.transport.close()

    def on_response_complete(self) -> None:
        """Between two requests a connection may be idle for its own time."""
        self._expect("")
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read: it has so long to begin again."""
        super().pause_writing()
        self._stall = self.loop.call_later(self.limits.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads."""
        if self._stall is not None:
            self._stall.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        for timer in (self._deadline, self._stall):
            if timer is not None:
                timer.cancel()
        if self.transport is not None:
            super().connection_lost(exc)


class DrainingServer(uvicorn.Server):
    """Ends in order: at the first signal `drain` is called and requests under way are waited for; the second ends it.

    `busy` says whether there are any; where they take too long, `give_up` is called before the end. While it drains it
    still accepts connections, so that a probe learns of it.
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

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to end: in order, or at once the second time."""
        self._captured_signals = [sig]  # raised again at the end, so that the exit code tells
        if self._draining_for is not None:
            self.should_exit = self.force_exit = True
        else:
            self._draining_for = 0.0
            self._drain()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second: end when nothing is left to wait for."""
        if self._draining_for is not None:
            if not self._busy():
                self.should_exit = True
            elif self._draining_for >= self._limits.grace_seconds:
                self._give_up()
                self.should_exit = True
            self._draining_for += DRAIN_TICK
        return await super().on_tick(counter)


def run_until_signal(server: DrainingServer, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until a signal ends it; `ready` is called when requests are accepted."""

    async def serve() -> None:
        waiting = asyncio.create_task(_when_started(server, ready))
        try:
            await server.serve([listener])
        finally:
            waiting.cancel()

    with suppress(asyncio.CancelledError):
        asyncio.run(serve())


async def _when_started(server: DrainingServer, ready: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    ready()
