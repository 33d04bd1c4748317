"""Runs a server for tests on a separate port, in threads of this process, and an engine with scripted replies.

Assembles the parts of the server as `mycli serve` does.
"""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.sequence import Request, SequenceOutput
from mycli.runtime.engine.stats import EngineStats
from mycli.runtime.errors import UserError
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.server.application import application
from mycli.runtime.server.http.connection import DrainingServer, listen
from mycli.runtime.server.http.settings import ServerSettings
from mycli.runtime.server.service import Service
from mycli.runtime.server.worker import EngineWorker
from mycli.runtime.utils.dtypes import FLOATS

JSON = {"content-type": "application/json"}


def load_fp32(folder: Path) -> tuple[LoadedModel, Engine]:
    """Load a small model on the CPU for `serving`."""
    opened = open_model_folder(folder)
    model = LoadedModel.load(opened, EngineConfig(device="cpu", dtype=FLOATS["fp32"]).place(opened.config))
    return model, Engine(model.runner, CacheShape.paged(512, 2048, 16), model.vocabulary_size, running=8)


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Return the error in the body; it must have all four fields, and may have Anthropic's details."""
        found: dict[str, Any] = self.json["error"]
        assert set(found) - {"details"} == {"message", "type", "param", "code"} and found["message"]
        return found

    @property
    def events(self) -> list[Any]:
        """Return the data of a stream of events, without the end marker."""
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


@dataclass
class Served:
    port: int
    service: Service
    server: DrainingServer
    log: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, seconds: float = 60
    ) -> Answer:
        """Send one request; `body` bytes are sent unchanged, anything else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {**(JSON if data is not None else {}), **(headers or {})})
            response = connection.getresponse()
            given = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, given, response.read())
        finally:
            connection.close()

    def raw(self, data: bytes, seconds: float = 20) -> bytes:
        """Send bytes to a socket and return all that comes back."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as link:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
            parts = []
            while part := link.recv(65536):
                parts.append(part)
            return b"".join(parts)

    def chat(self, text: str = "What is the capital of Japan?", **fields: Any) -> Answer:
        """Send a question to the model, with greedy decoding unless `fields` change it."""
        messages = [{"role": "user", "content": text}]
        return self.ask(
            "POST", "/v1/chat/completions", {"model": "pico", "messages": messages, "temperature": 0, **fields}
        )

    def logged(self, count: int, seconds: float = 20) -> bool:
        """Wait for `count` lines of the log, which are written after the response."""
        end = time.monotonic() + seconds
        while len(self.log) < count and time.monotonic() < end:
            time.sleep(0.01)
        return len(self.log) >= count

    def log_line(self, text: str, seconds: float = 20) -> str:
        """Wait for a line of the log that contains `text`, and return it."""
        end = time.monotonic() + seconds
        while True:
            line = next((line for line in list(self.log) if text in line), None)
            if line is not None or time.monotonic() > end:
                assert line is not None, f"no line of the log contains {text!r}"
                return line
            time.sleep(0.01)

    def busy(self, seconds: float = 60) -> None:
        """Wait until the engine runs a request."""
        end = time.monotonic() + seconds
        while not self.service.worker.stats.running:
            assert time.monotonic() < end, "no request is running"
            time.sleep(0.005)

    def idle(self, seconds: float = 60) -> None:
        """Wait until no request is running in the worker and its engine."""
        end = time.monotonic() + seconds
        while self.service.worker.underway or self.service.worker.stats.running or self.service.worker.stats.waiting:
            assert time.monotonic() < end, "something is still under way"
            time.sleep(0.01)


_IMPATIENT = SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 10)})


class ImpatientServer(DrainingServer):
    """Ends within hundredths of a second, where uvicorn waits one or two tenths: most servers of tests live shorter."""

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):  # ten times a second, as in uvicorn
            counter += 1
            for _ in range(10):
                if not self.should_exit:
                    await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        vars(uvicorn.server)["asyncio"] = _IMPATIENT
        try:
            await super().shutdown(sockets)
        finally:
            vars(uvicorn.server)["asyncio"] = asyncio


@contextmanager
def serving(loaded: LoadedModel, engine: Any, settings: ServerSettings | None = None) -> Iterator[Served]:
    """Run a server of `engine` inside the context."""
    settings = settings or ServerSettings(("pico",))
    listener = listen("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # reveals a client that does not read
    lines: list[str] = []
    worker = EngineWorker(engine, settings.limits.waiting, lines.append, lambda: server.end())
    service = Service(settings, loaded, worker, 1_700_000_000)

    def drain() -> None:
        service.draining = True

    app = application(service, lines.append)
    server = ImpatientServer(app, settings.limits, drain, lambda: service.busy, worker.cancel_all)
    worker.start()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield Served(listener.getsockname()[1], service, server, lines)
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        worker.stop()
        service.close()
        assert not thread.is_alive()


def unserved(loaded: LoadedModel, settings: ServerSettings | None = None, context: int = 64) -> Service:
    """Return a service without a server, whose engine is not started: it prepares requests."""
    engine: Any = ScriptedEngine(lambda request: [5], context)
    return Service(settings or ServerSettings(("pico",)), loaded, EngineWorker(engine, 8, print), 0)


Script = Callable[[Request], Sequence[int]]


@dataclass
class _Turn:
    sequence: int
    request: Request
    left: list[int]
    fresh: bool = True


class ScriptedEngine:
    """Generates scripted replies: `script` returns the tokens, one for each step.

    `pause`: seconds of a step; `error`: raised by the next step; clearing `held` blocks steps.
    """

    shares_cores, nbytes = True, 0

    def __init__(self, script: Script, context: int = 2048, running: int = 8, pause: float = 0.0) -> None:
        self.context, self._most, self.pause = context, running, pause
        self._script = script
        self._waiting: list[_Turn] = []
        self._running: list[_Turn] = []
        self._next = 0
        self.cancelled: list[int] = []
        self.prompts: list[tuple[int, ...]] = []
        self.error: Exception | None = None
        self.held = threading.Event()
        self.held.set()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(len(self._running), len(self._waiting), 0, 0, 1, 0, 0, {})

    def submit_replies(self, request: Request, count: int) -> list[int]:
        self.prompts.append(request.prompt)
        first = self._next + 1
        for number in range(first, first + count):
            self._waiting.append(_Turn(number, request, list(self._script(request))))
        self._next += count
        return list(range(first, first + count))

    def forget(self) -> None:
        """Do nothing: no prefix is cached."""

    def cancel(self, sequence: int) -> None:
        self.cancelled.append(sequence)
        self._waiting = [one for one in self._waiting if one.sequence != sequence]
        self._running = [one for one in self._running if one.sequence != sequence]

    def step(self) -> Sequence[SequenceOutput]:
        self.held.wait(30)
        if self.pause:
            time.sleep(self.pause)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        while self._waiting and len(self._running) < self._most:
            self._running.append(self._waiting.pop(0))
        outputs = []
        for one in list(self._running):
            limit = one.request.limit
            token, end = one.left[:1], len(one.left) <= 1
            del one.left[:1]
            if limit is not None:
                one.request = _with_limit(one.request, limit - len(token))
            reason: Any = "stop" if end else "length" if one.request.limit == 0 else None
            scored = one.request.prompt[1:] if one.request.prompt_logprobs and one.fresh else ()
            told, one.fresh = tuple(TokenLogprob(each, -1.0, ()) for each in scored), False
            scores = tuple(TokenLogprob(each, -1.0, ()) for each in token) if one.request.logprobs is not None else ()
            outputs.append(SequenceOutput(one.sequence, tuple(token), scores, told, reason))
            if reason is not None:
                self._running.remove(one)
        return outputs


class GrammarEngine(ScriptedEngine):
    """Writes the script as far as the request's grammar allows, and ends there."""

    def submit_replies(self, request: Request, count: int) -> list[int]:
        numbers = super().submit_replies(request, count)
        if request.grammar is None:
            return numbers
        for turn in self._waiting[-count:]:
            state, kept = request.grammar.start(), []
            for token in turn.left:
                try:
                    state.accept(token)
                except UserError:
                    break
                kept.append(token)
            turn.left = kept
        return numbers


def _with_limit(request: Request, limit: int) -> Request:
    return replace(request, limit=limit)


def joined(answer: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Return content, reasoning, tool calls and finish reason of a chat, whole or streamed."""
    if answer.headers["content-type"].startswith("application/json"):
        (choice,) = answer.json["choices"]
        message = choice["message"]
        calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])]
        return message["content"] or "", message.get("reasoning", ""), calls, choice["finish_reason"]
    choices = [event["choices"][0] for event in answer.events if event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    calls = list[tuple[str, str]]()
    for part in (part for delta in deltas for part in delta.get("tool_calls", [])):
        if "id" in part:
            assert part["index"] == len(calls)
            calls.append((part["function"]["name"], ""))
        assert part["index"] == len(calls) - 1
        calls[-1] = calls[-1][0], calls[-1][1] + part["function"]["arguments"]
    return (
        "".join(delta.get("content", "") for delta in deltas),
        "".join(delta.get("reasoning", "") for delta in deltas),
        calls,
        choices[-1]["finish_reason"],
    )
