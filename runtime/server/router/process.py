"""The process that serves one model on a Unix socket, from start to end.

Its standard input is a pipe from this process. It ends when the pipe closes, so it also ends when this process is
killed.
"""

import asyncio
import json
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

import httpx2

from mycli.runtime.server.router.model import RoutedModel
from mycli.runtime.utils.sanitize import one_line

_LINE_BYTES = 1 << 20  # longest line of output: the line with the address also describes all passes
_TERM_SECONDS = 10.0  # from SIGTERM to SIGKILL; no request is running then


class LoadError(Exception):
    """A process ended before it served; the message is the error that it printed."""


class ModelProcess:
    """A process that serves a model, and the connections to it."""

    def __init__(self, process: Process, model: RoutedModel) -> None:
        self._process = process
        transport = httpx2.AsyncHTTPTransport(
            uds=str(model.socket), limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        )
        # No limits here: a reply may take any time, and queueing and silence are bounded in the model's process. A pool
        # limit would let slow replies block /metrics.
        self.client = httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)
        self._readers: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, model: RoutedModel, environment: Mapping[str, str], log: Callable[[str], None]) -> Self:
        """Start the process and wait until it serves; `log` receives its lines. Raises LoadError."""
        try:
            process = await asyncio.create_subprocess_exec(
                *model.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                limit=_LINE_BYTES,
                start_new_session=True,  # Ctrl-C in the terminal is for this process, which finishes replies first
            )
        except OSError as error:
            raise LoadError(f"its process cannot be started: {error.strerror}") from None
        started = cls(process, model)
        assert process.stdout is not None and process.stderr is not None
        try:
            started._relay(process.stderr, log)
            announced = await _announcement(process.stdout)
            if "url" not in announced:
                await process.wait()
                problem = announced.get("error")
                cause = problem.get("message") if isinstance(problem, dict) else None
                raise LoadError(one_line(str(cause or started.exit_reason), 500))
            started._relay(process.stdout, log)
        except BaseException:  # also when loading is cancelled at shutdown: no process may outlive the attempt
            await started.kill()
            raise
        return started

    def _relay(self, stream: asyncio.StreamReader, log: Callable[[str], None]) -> None:
        async def read() -> None:
            # Read on after a line beyond the limit, which is dropped: a full pipe would block the model's process.
            while True:
                with suppress(ValueError):
                    if not (line := await stream.readline()):
                        return
                    log(line.decode("utf-8", "replace").rstrip("\n"))

        task = asyncio.create_task(read())
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)

    @property
    def exit_reason(self) -> str:
        code = self._process.returncode
        if code is None:
            return "its process does not answer"
        if code < 0:
            with suppress(ValueError):
                return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    async def ended(self) -> str:
        """Wait for the end of the process and return the reason."""
        await self._process.wait()
        return self.exit_reason

    async def stop(self) -> None:
        """End the process: SIGTERM, then SIGKILL. Returns when its memory is free."""
        await self.client.aclose()
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(_TERM_SECONDS):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self.client.aclose()


async def _announcement(stream: asyncio.StreamReader) -> dict[str, Any]:
    # The first line of JSON: the address of a server, or the error of one that could not start.
    with suppress(ValueError):
        value = json.loads(await stream.readline() or b"{}")
        if isinstance(value, dict):
            return value
    return {}


def child_environment(without: tuple[str, ...]) -> dict[str, str]:
    """Return the environment of this process without the variables `without`."""
    return {name: value for name, value in os.environ.items() if name not in without}
