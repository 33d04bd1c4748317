"""Loads models on request within a memory limit; the least recently used model is unloaded to make room.

Everything runs on one event loop. `_schedule` is called after every change of state, and starts the loads and unloads
that have become possible.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from mycli.runtime.server.http.api_error import ApiError, shutting_down
from mycli.runtime.server.http.settings import ServerLimits, untagged
from mycli.runtime.server.router.model import RoutedModel
from mycli.runtime.server.router.process import LoadError, ModelProcess
from mycli.runtime.utils.units import human_bytes

SlotState = Literal["unloaded", "loading", "loaded", "unloading"]
Start = Callable[[RoutedModel], Awaitable[ModelProcess]]
# Requests for a model that failed to load are refused for this long: each attempt takes seconds of CPU.
RETRY_SECONDS = 10.0


@dataclass(eq=False)
class Slot:
    """A model and its process. Times are seconds of the pool's clock.

    active: requests in the process; leaving: takes no more requests, because another model needs its memory; used: time
    at which the last request began; rested: time at which it ended; idle: as in `RoutedModel`, or the keep_alive of the
    last request.
    """

    model: RoutedModel
    idle: float | None
    state: SlotState = "unloaded"
    process: ModelProcess | None = None
    active: int = 0
    leaving: bool = False
    waiters: deque[asyncio.Future[None]] = field(default_factory=deque)
    waiting_since: float = 0.0
    used: float = 0.0
    rested: float = 0.0
    loaded_at: float = 0.0
    load_seconds: float = 0.0
    failure: str = ""
    retry_at: float = 0.0
    loads: int = 0
    evictions: int = 0
    deaths: int = 0

    @property
    def shown_state(self) -> str:
        return "failed" if self.state == "unloaded" and (self.failure or self.model.problem) else self.state


class ModelPool:
    """The models of a server. rooms: memory limit in bytes by place; start: starts the process of a model."""

    def __init__(
        self,
        models: Sequence[RoutedModel],
        rooms: Mapping[str, int],
        limits: ServerLimits,
        start: Start,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slots = {model.name: Slot(model, model.idle) for model in models}
        self.rooms = rooms
        self._limits, self._start, self._log, self._clock = limits, start, log, clock
        self._by_name = {name: self.slots[model.name] for model in models for name in model.names}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def find(self, name: str | None) -> Slot:
        """Return the slot of a name, the first model for None. Raises ApiError for a model that is not served."""
        if name is None and self.slots:
            return next(iter(self.slots.values()))
        name = name or ""
        slot = self._by_name.get(name) or self._by_name.get(untagged(name))
        if slot is None:
            served = ", ".join(self.slots)
            message = f"model {name[:100]!r} is not served here; served: {served:.300}"
            raise ApiError(404, message, "model_not_found", param="model")
        return slot

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their model to be loaded."""
        return sum(len(slot.waiters) for slot in self.slots.values())

    @property
    def active(self) -> int:
        return sum(slot.active for slot in self.slots.values())

    def add(self, model: RoutedModel) -> None:
        """Add a model, or replace one that is not loaded."""
        slot = self.slots.get(model.name)
        if slot is None:
            slot = self.slots[model.name] = Slot(model, model.idle)
            self._by_name |= {name: slot for name in model.names if name not in self._by_name}
        elif slot.state == "unloaded":
            # A loaded model is left as it is: its process may have requests.
            slot.model, slot.failure, slot.retry_at = model, "", 0.0

    async def remove(self, slot: Slot) -> None:
        """Unload a model and remove it. Raises ApiError if it has requests."""
        if slot.active or slot.waiters or slot.state in ("loading", "unloading"):
            raise ApiError(409, f"{slot.model.name} is in use", "model_in_use", param="model")
        for name in [name for name, other in self._by_name.items() if other is slot]:
            del self._by_name[name]
        del self.slots[slot.model.name]
        if slot.process is not None:
            slot.state = "unloading"
            await self._unload(slot)

    def expiry(self, slot: Slot) -> float | None:
        """Return the seconds until a loaded model is unloaded if no request comes; None for never."""
        if slot.idle is None or slot.model.pinned:
            return None
        return slot.idle if slot.active else max(slot.rested + slot.idle - self._clock(), 0.0)

    def start_pinned(self) -> None:
        """Load the pinned models."""
        for slot in self.slots.values():
            if slot.model.pinned:
                self._spawn(self.load(slot))

    async def load(self, slot: Slot) -> None:
        """Load a model, if it is not. A failure is logged and shown in its state."""
        try:
            async with self.use(slot):
                pass
        except ApiError as error:
            self._log(f"{slot.model.name}: {error.message}")

    def unload(self, slot: Slot) -> None:
        """Unload a model as soon as it has no requests."""
        if slot.state != "unloaded":  # it would unload the model after the next request, which loads it
            slot.idle = 0.0
            self._rest(slot)

    @asynccontextmanager
    async def use(self, slot: Slot) -> AsyncIterator[ModelProcess]:
        """Wait until the model is loaded, and keep it loaded inside the context. Raises ApiError."""
        await self._enter(slot)
        assert slot.process is not None
        try:
            yield slot.process
        finally:
            self._leave(slot)

    def _leave(self, slot: Slot) -> None:
        slot.active -= 1
        slot.rested = self._clock()
        self._schedule()
        self._rest(slot)

    async def _enter(self, slot: Slot) -> None:
        self._check(slot)
        # A model that is leaving takes no new requests, even while it is loaded: under steady load it would never
        # leave.
        if slot.state == "loaded" and not slot.leaving:
            self._admit(slot)
            return
        if self.waiting >= self._limits.waiting:
            message = f"queue full: {self.waiting} requests are waiting, at most {self._limits.waiting} may"
            raise ApiError(429, message, "queue_full", headers={"retry-after": "5"})
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not slot.waiters:
            slot.waiting_since = self._clock()
        slot.waiters.append(future)
        self._schedule()
        try:
            # Shielded: the future is cancelled below, where it is known whether the request was admitted meanwhile.
            async with asyncio.timeout(self._limits.queue_seconds):
                await asyncio.shield(future)
        except BaseException as error:  # also when the client disconnects, which cancels this task
            if not future.done():
                future.cancel()
                slot.waiters.remove(future)
                self._schedule()
            elif not future.cancelled() and future.exception() is None:
                self._leave(slot)  # admitted in the same moment
            if isinstance(error, TimeoutError):
                message = (
                    f"{slot.model.name} was not loaded within {self._limits.queue_seconds:g} s: the server is busy"
                )
                raise ApiError(504, message, "queue_timeout") from None
            raise

    def _check(self, slot: Slot) -> None:
        model = slot.model
        if self._closed:
            raise shutting_down()
        # Pinned models never leave, so a model that does not fit next to them would wait for ever: refuse it now.
        room = self.rooms.get(model.place, 0)
        pinned = sum(
            other.model.nbytes
            for other in self.slots.values()
            if other.model.pinned and other is not slot and other.model.place == model.place
        )
        cause, code = slot.failure if self._clock() < slot.retry_at else "", "model_load_failed"
        if model.problem:
            cause = model.problem
        elif model.nbytes > room - pinned:
            held = f", of which pinned models use {human_bytes(pinned)}" if pinned else ""
            cause = f"it needs {human_bytes(model.nbytes)}; models may use {human_bytes(room)}{held}"
            code = "model_too_large"
        if cause:
            raise ApiError(503, f"{model.name} cannot be loaded: {cause}", code, param="model")

    def _admit(self, slot: Slot) -> None:
        slot.active += 1
        slot.used = self._clock()

    # Scheduling

    def _schedule(self) -> None:
        if self._closed:
            return
        for slot in self.slots.values():
            slot.leaving = False  # decided anew each time: the request that needed the memory may be gone
        missing = [slot for slot in self.slots.values() if slot.waiters and slot.state == "unloaded"]
        for slot in sorted(missing, key=lambda slot: slot.waiting_since):
            # In order of arrival: a large model would wait for ever if smaller ones were loaded first.
            if not self._make_room(slot):
                break
            slot.state = "loading"
            self._spawn(self._load(slot))
        for slot in self.slots.values():
            if slot.state == "loaded" and not slot.leaving:
                self._admit_all(slot)
            elif slot.state == "loaded" and not slot.active:
                slot.evictions += 1
                slot.state = "unloading"
                self._spawn(self._unload(slot))

    def _make_room(self, slot: Slot) -> bool:
        # Return whether `slot` fits now. If not, mark the least recently used models as leaving; idle ones come first.
        place, now = slot.model.place, self._clock()
        others = [other for other in self.slots.values() if other.model.place == place and other.state != "unloaded"]
        free = self.rooms[place] - sum(other.model.nbytes for other in others)
        if free >= slot.model.nbytes:
            return True
        # Memory that is about to be free counts, so that no further model is unloaded for it. A loading model is
        # never chosen: its requests came first.
        free += sum(other.model.nbytes for other in others if other.state == "unloading")
        victims = [other for other in others if other.state == "loaded" and not other.model.pinned]
        for victim in sorted(victims, key=lambda victim: (victim.active > 0, victim.used)):
            if free >= slot.model.nbytes:
                break
            # A busy model stays for at least as long as its load took; otherwise clients of two models that do not fit
            # together would spend all time on loading.
            stays = victim.loaded_at + victim.load_seconds - now
            if victim.active and stays > 0:
                asyncio.get_running_loop().call_later(stays, self._schedule)
                break
            victim.leaving = True
            free += victim.model.nbytes
        return False

    def _admit_all(self, slot: Slot) -> None:
        while slot.waiters:
            future = slot.waiters.popleft()
            if not future.done():
                self._admit(slot)
                future.set_result(None)

    def _rest(self, slot: Slot) -> None:
        # Unload an idle model, or check again at the end of its idle time. A request in between moves `rested`, so an
        # earlier timer finds time left and does nothing but set the next one.
        if slot.state != "loaded" or slot.active or slot.idle is None or slot.model.pinned or self._closed:
            return
        left = slot.rested + slot.idle - self._clock()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._rest, slot)
            return
        slot.state = "unloading"
        self._spawn(self._unload(slot))

    # Processes

    async def _load(self, slot: Slot) -> None:
        began = self._clock()
        try:
            process = await self._start(slot.model)
        except LoadError as error:
            slot.state, slot.failure, slot.retry_at = "unloaded", str(error), self._clock() + RETRY_SECONDS
            self._log(f"{slot.model.name} cannot be loaded: {error}")
            while slot.waiters:
                future = slot.waiters.popleft()
                if not future.done():
                    message = f"{slot.model.name} cannot be loaded: {error}"
                    future.set_exception(ApiError(503, message, "model_load_failed", param="model"))
            self._revive(slot)
        else:
            slot.process, slot.state, slot.failure = process, "loaded", ""
            slot.loads, slot.loaded_at = slot.loads + 1, self._clock()
            slot.rested = slot.used = slot.loaded_at  # the idle time counts from now: loading may take longer
            slot.load_seconds = slot.loaded_at - began
            self._spawn(self._watch(slot, process))
            self._admit_all(slot)
            self._rest(slot)
        self._schedule()

    async def _watch(self, slot: Slot, process: ModelProcess) -> None:
        # Only a request or a pin starts it again: a crash may repeat.
        reason = await process.ended()
        if slot.process is not process or slot.state != "loaded":
            return
        slot.process, slot.state, slot.failure = None, "unloaded", reason
        slot.deaths += 1
        self._log(f"{slot.model.name}: {reason}; the next request loads it again")
        await process.kill()
        self._revive(slot)
        self._schedule()

    def _revive(self, slot: Slot) -> None:
        # Load a pinned model again, after a failed attempt not before `RETRY_SECONDS`, as for a request.
        if slot.model.pinned and not self._closed:
            delay = max(slot.retry_at - self._clock(), 0.0)
            asyncio.get_running_loop().call_later(delay, lambda: self._spawn(self.load(slot)))

    async def _unload(self, slot: Slot) -> None:
        assert slot.process is not None
        await slot.process.stop()
        slot.process, slot.state, slot.idle = None, "unloaded", slot.model.idle
        self._schedule()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if self._closed:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all processes."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(slot.process.stop() for slot in self.slots.values() if slot.process is not None))
