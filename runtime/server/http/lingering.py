"""Closes connections without losing the response, and finds out whether a client that sends no more still reads.

uvicorn closes immediately: what the client still sends then resets the connection, and the response is lost. A client
that has ended its side, as `nc -N` does, counts as gone.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import h11
from h11._writers import ChunkedWriter

_BODIES = 16  # of the largest size: as many bytes are discarded
_CHECK_SECONDS = 0.1
_PROBE_CHECKS = 50  # checks from one probe to the next


class LingeringTransport:
    """A transport whose `close` reads and discards what the client still sends, if `unread` says that it does.

    seconds: the limit of that; nbytes: of the largest body. Everything else is as in `transport`.
    """

    def __init__(self, transport: asyncio.Transport, unread: Callable[[], bool], seconds: float, nbytes: int) -> None:
        self._transport, self._unread = transport, unread
        self.seconds, self._most, self.discarded = seconds, _BODIES * nbytes, 0
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._timer is not None or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._unread():
            self._transport.close()
            return
        self._timer = asyncio.get_running_loop().call_later(self.seconds, self._transport.close)
        self._transport.write_eof()
        self._transport.resume_reading()

    def discard(self, nbytes: int) -> None:
        """Count discarded bytes of a request, and close when they are too many."""
        self.discarded += nbytes
        if self.discarded > self._most:
            self._transport.abort()

    def lost(self) -> None:
        """End the timer of a connection that is closed."""
        if self._timer is not None:
            self._timer.cancel()


class ClientProbe:
    """Closes a connection when a client that has ended its side of it does not read either.

    The end of a half-closed connection and that of a closed one look the same until something is sent: a client that
    has closed answers with a reset. Sent are an interim response or, within a chunked body, a leading zero of the next
    chunk's size; clients skip both.
    """

    def __init__(self, transport: asyncio.Transport, conn: h11.Connection) -> None:
        self._transport, self._conn = transport, conn
        self._checks, self._padded = 0, False
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._check()

    def _check(self) -> None:
        if self._transport.is_closing():
            return
        if self._checks % _PROBE_CHECKS == 0:
            self._send()
        self._checks += 1
        # Not by a write: the kernel notes the reset, and asyncio does not look at a socket after its end of file.
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
        else:
            asyncio.get_running_loop().call_later(_CHECK_SECONDS, self._check)

    def _send(self) -> None:
        if self._conn.our_state is h11.SEND_RESPONSE:
            interim = self._conn.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
            self._transport.write(interim or b"")
        elif isinstance(self._conn._writer, ChunkedWriter) and not self._padded:
            self._padded = True  # once: parsers limit the digits of a size
            self._transport.write(b"0")
