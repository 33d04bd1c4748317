"""What is new of a request, on its way from the text thread to the event loop of whoever asked.

Knows pieces and loops; does not know engines or protocols.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from mycli.runtime.server.api_error import ApiError
from mycli.runtime.server.reply_reader import Piece

MAX_BEHIND = 1 << 16  # pieces that a reader has not taken; a reply is rarely so long


class Delivery:
    """The pieces of a request on the way to its handler. `put`, `afterwards` from any thread, others from the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: deque[Piece | ApiError] = deque()
        self._arrived = asyncio.Event()

    def put(self, pieces: Sequence[Piece | ApiError]) -> None:
        """Hand over; dropped where the loop is gone."""
        with suppress(RuntimeError):  # closed: the server has ended
            self._loop.call_soon_threadsafe(self._take, pieces)

    def afterwards(self, work: Callable[[], None]) -> None:
        """`work()` on the loop, after everybody there has had a turn with what was put; from any thread."""
        with suppress(RuntimeError):  # as above
            self._loop.call_soon_threadsafe(self._loop.call_soon, work)

    def fail(self, error: ApiError) -> None:
        """End the request, from its own loop: its client has gone."""
        self._take([error])

    def _take(self, pieces: Sequence[Piece | ApiError]) -> None:
        self._pieces.extend(pieces)
        if len(self._pieces) > MAX_BEHIND:
            self._pieces.clear()
            self._pieces.append(ApiError(503, "the reader of this reply is too slow", "slow_reader"))
        self._arrived.set()

    async def next(self) -> list[Piece]:
        """All that has come, at least one. Raises ApiError for a request that failed as a whole."""
        while not self._pieces:
            self._arrived.clear()
            await self._arrived.wait()
        found: list[Piece] = []
        while self._pieces:
            one = self._pieces.popleft()
            if isinstance(one, ApiError):
                raise one
            found.append(one)
        return found
