"""A pool of models with simulated processes, on a clock of virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mycli.runtime.server.http.settings import ServerLimits
from mycli.runtime.server.router.model import RoutedModel
from mycli.runtime.server.router.pool import ModelPool
from mycli.runtime.server.router.process import LoadError
from tests.support.virtual_time import run_in_virtual_time


class FakeProcess:
    """Simulates a process that ends only when it is stopped or `die` is called."""

    def __init__(self, model: RoutedModel, events: list[str]) -> None:
        self.model, self._events, self.over = model, events, asyncio.Event()
        events.append(f"+{model.name}")

    async def ended(self) -> str:
        await self.over.wait()
        return "its process was ended by SIGKILL"

    async def stop(self) -> None:
        if not self.over.is_set():
            self._events.append(f"-{self.model.name}")
        self.over.set()

    async def kill(self) -> None:
        self.over.set()


def model(name: str, nbytes: int = 1, **fields: Any) -> RoutedModel:
    return RoutedModel((name,), (), Path("/nowhere"), nbytes=nbytes, **fields)


class Bench:
    """Holds a model pool with fake processes; `events`: loads (+name) and unloads (-name) in order."""

    def __init__(self, *models: RoutedModel, room: int = 2, load: float = 0.0, **limits: Any) -> None:
        self.events: list[str] = []
        self.processes: dict[str, FakeProcess] = {}
        self.failures: dict[str, str] = {}
        self.log: list[str] = []
        self._load = load
        clock = asyncio.get_running_loop().time
        self.pool = ModelPool(models, {"cpu": room}, ServerLimits(**limits), self._start, self.log.append, clock)  # type: ignore[arg-type]  # fake processes
        self.slots = self.pool.slots

    async def _start(self, started: RoutedModel) -> FakeProcess:
        await asyncio.sleep(self._load)
        if started.name in self.failures:
            raise LoadError(self.failures[started.name])
        place = started.place
        slots = [slot for slot in self.slots.values() if slot.state != "unloaded" and slot.model.place == place]
        assert sum(slot.model.nbytes for slot in slots) <= self.pool.rooms[place]
        self.processes[started.name] = FakeProcess(started, self.events)
        return self.processes[started.name]

    async def ask(self, name: str, work: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0.001)) -> None:
        async with self.pool.use(self.pool.find(name)):
            assert self.slots[name].state == "loaded"
            await work()


def run(test: Callable[[], Awaitable[None]]) -> None:
    run_in_virtual_time(test, 3600)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0.001)
