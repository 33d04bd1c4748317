"""Passes the pieces of a request from the text thread to the event loop of its handler."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.server.http.api_error import ApiError

MAX_BEHIND = 1 << 16  # pieces queued for a slow reader: longer than nearly all replies


class Delivery:
    """A queue of pieces. `put` and `afterwards` may be called from any thread, the rest from the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: deque[Piece | ApiError] = deque()
        self._arrived = asyncio.Event()

    def put(self, pieces: Sequence[Piece | ApiError]) -> None:
        """Queue pieces for the handler; drop them if the event loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._add, pieces)

    def afterwards(self, work: Callable[[], None]) -> None:
        """Call `work` on the event loop once all handlers have run for the pieces put before."""
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._loop.call_soon, work)

    def fail(self, error: ApiError) -> None:
        """End the request with an error, behind the pieces that are queued."""
        self._add([error])

    def _add(self, pieces: Sequence[Piece | ApiError]) -> None:
        self._pieces.extend(pieces)
        if len(self._pieces) > MAX_BEHIND:
            self._pieces.clear()
            self._pieces.append(ApiError(503, "the client reads the reply too slowly", "slow_reader"))
        self._arrived.set()

    async def next(self) -> list[Piece]:
        """Wait for at least one piece and return all that are queued. Raises ApiError if the request failed."""
        while not self._pieces:
            self._arrived.clear()
            await self._arrived.wait()
        pieces: list[Piece] = []
        while self._pieces:
            piece = self._pieces.popleft()
            if isinstance(piece, ApiError):
                raise piece
            pieces.append(piece)
        return pieces
