"""Runs coroutines on an event loop whose clock jumps to the next timer, so that tests depend on no machine's speed."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable


class _JumpingSelector(selectors.SelectSelector):
    """Returns at once and moves the clock by the time it would have waited. It is for programs without sockets."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _JumpingSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_in_virtual_time(work: Callable[[], Awaitable[None]], seconds: float) -> None:
    """Run `work`. Raises TimeoutError if it takes more than `seconds` of virtual time."""

    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await work()

    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        runner.run(limited())
