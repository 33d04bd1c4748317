"""Test which process answers a request to a server for several models, and what loads and unloads it."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mycli.runtime.engine.replies.journal import ReplyJournal
from mycli.runtime.server.http.settings import ServerLimits, ServerSettings
from mycli.runtime.server.ollama.card import NEVER, utc_text
from mycli.runtime.server.ollama.manage import MANAGING
from mycli.runtime.server.router.application import Router, router_application
from mycli.runtime.server.router.management import ModelManager
from mycli.runtime.server.router.model import RoutedModel
from mycli.runtime.server.router.pool import ModelPool
from tests.support.model_pools import FakeProcess, model

CHAT = [{"role": "user", "content": "Hi"}]


class Answering(FakeProcess):
    """Simulates a process that answers a path with its entry in `answers`, or with the model's name."""

    answers: dict[tuple[str, str], int | Exception]

    def __init__(self, model: RoutedModel, events: list[str]) -> None:
        super().__init__(model, events)
        self.received: list[str] = []
        transport = httpx2.MockTransport(self._answer)
        self.client = httpx2.AsyncClient(transport=transport, base_url="http://model")

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        self.received.append(f"{request.method} {request.url.raw_path.decode()}")
        status = self.answers.get((self.model.name, request.url.path), 200)
        if isinstance(status, Exception):
            raise status
        return httpx2.Response(status, json={"by": self.model.name})


class Site:
    """A router for simulated processes, and a client of it."""

    def __init__(self, *models: RoutedModel, manager: ModelManager | None = None, **settings: Any) -> None:
        self.events: list[str] = []
        self.processes: dict[str, Answering] = {}
        self.answers: dict[tuple[str, str], int | Exception] = {}
        pool = ModelPool(models, {"cpu": 9, "cuda:0": 9}, ServerLimits(), self._start, print)  # type: ignore[arg-type]  # simulated
        self.router = Router(ServerSettings(("first",), **settings), pool, manager)
        self._application = router_application(self.router, lambda line: None)

    async def _start(self, started: RoutedModel) -> Answering:
        process = self.processes[started.name] = Answering(started, self.events)
        process.answers = self.answers
        return process

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await self._application({**scope, "state": {}}, receive, send)

        transport = httpx2.ASGITransport(with_state)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.request(method, path, json=body)
        return answer.status_code, json.loads(answer.content.splitlines()[-1])


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def test_a_request_goes_to_the_process_of_its_model() -> None:
    async def test() -> None:
        site = Site(model("first"), model("second"))
        body = {"model": "second", "messages": CHAT, "keep_alive": 0}
        assert await site.ask("POST", "/v1/chat/completions?a=1", body) == (200, {"by": "second"})
        assert await site.ask("POST", "/v1/completions", {"prompt": "Hi"}) == (200, {"by": "first"})
        received = {name: process.received for name, process in site.processes.items()}
        assert received == {"second": ["POST /v1/chat/completions?a=1"], "first": ["POST /v1/completions"]}
        assert site.router.pool.slots["second"].idle is None, "keep_alive is a field of Ollama's interface"

    run(test)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/generate", {"prompt": "Hi"}),
        ("/api/generate", {"suffix": "Hi"}),
        ("/api/chat", {"messages": CHAT}),
        ("/api/embed", {"input": "Hi"}),
        ("/api/generate", {}),
    ],
)
@pytest.mark.parametrize(("keep_alive", "idle"), [(0, 0.0), (60, 60.0), (-1, None)])
def test_a_request_of_ollama_sets_how_long_its_model_stays(
    path: str, fields: Any, keep_alive: int, idle: float | None
) -> None:
    async def test() -> None:
        site = Site(model("first"))
        status, reply = await site.ask("POST", path, {"model": "first", "keep_alive": keep_alive, **fields})
        await asyncio.sleep(0)
        if idle == 0 and not fields:
            assert (status, reply["done_reason"], site.events) == (200, "unload", [])
        elif idle == 0:
            assert (status, reply, site.events) == (200, {"by": "first"}, ["+first", "-first"])
        else:
            assert (status, reply, site.events) == (200, {"by": "first"}, ["+first"])
            assert site.router.pool.slots["first"].idle == idle

    run(test)


def test_a_loaded_model_is_unloaded_by_its_process() -> None:
    async def test() -> None:
        site = Site(model("first"))
        await site.ask("POST", "/v1/models/load", {"model": "first"})
        assert await site.ask("POST", "/api/chat", {"model": "first", "keep_alive": 0}) == (200, {"by": "first"})
        await asyncio.sleep(0)
        assert site.events == ["+first", "-first"]

    run(test)


def test_a_server_is_busy_while_it_reads_or_forwards_a_request() -> None:
    async def test() -> None:
        router = Site(model("first")).router
        assert not router.busy
        router.requests = 1
        assert router.busy
        router.requests = 0
        async with router.pool.use(router.pool.slots["first"]):
            assert router.busy
        assert not router.busy

    run(test)


def test_the_state_of_a_model_counts_its_requests() -> None:
    async def test() -> None:
        site = Site(model("first"))
        slot = site.router.pool.slots["first"]
        status, shown = await site.ask("POST", "/v1/models/load", {"model": "first"})
        assert (status, shown["state"], shown["requests"]) == (200, "loaded", 0)
        async with site.router.pool.use(slot), site.router.pool.use(slot):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            slot.waiters.append(waiter)
            assert (await site.ask("GET", "/v1/models/first"))[1]["requests"] == 3
            slot.waiters.clear()
        await site.ask("POST", "/v1/models/unload", {"model": "first"})
        await asyncio.sleep(0)
        assert site.events == ["+first", "-first"]

    run(test)


def test_loaded_models_have_their_place_and_their_end() -> None:
    async def test() -> None:
        names: dict[str, Any] = {"cpu": {}, "gpu": {"place": "cuda:0"}, "idle": {"idle": 3600.0}}
        site = Site(*(model(name, 2, **fields) for name, fields in names.items()), model("other"))
        for name in names:
            await site.ask("POST", "/v1/models/load", {"model": name})
        _, listed = await site.ask("GET", "/api/ps")
        entries = {entry["name"]: entry for entry in listed["models"]}
        assert [(name, entry["size"], entry["size_vram"]) for name, entry in entries.items()] == [
            ("cpu", 2, 0),
            ("gpu", 2, 2),
            ("idle", 2, 0),
        ]
        assert entries["cpu"]["expires_at"] == NEVER
        assert utc_text(datetime.now(UTC)) < entries["idle"]["expires_at"] < NEVER

    run(test)


def test_the_description_is_that_of_a_loaded_model() -> None:
    async def test() -> None:
        site = Site(model("first"), model("second"))
        await site.ask("POST", "/v1/models/load", {"model": "second"})
        site.answers["second", "/openapi.json"] = 500
        status, reply = await site.ask("GET", "/openapi.json")
        assert (status, reply["error"]["message"]) == (502, "second did not describe its interfaces")
        assert list(site.processes) == ["second"]

    run(test)


def test_a_model_describes_itself_to_clients_of_llama_cpp() -> None:
    async def test() -> None:
        site = Site(model("first"), model("second"))
        site.answers["second", "/slots"] = 501
        assert await site.ask("GET", "/props") == (200, {"by": "first"})
        assert await site.ask("GET", "/slots?model=second") == (501, {"by": "second"})
        assert site.processes["second"].received == ["GET /slots?model=second"]

    run(test)


@pytest.mark.parametrize(("method", "more"), [("GET", ""), ("DELETE", ""), ("GET", "/input_items")])
def test_a_stored_response_is_that_of_the_loaded_model_that_has_it(method: str, more: str) -> None:
    async def test() -> None:
        path = f"/v1/responses/resp_1{more}"
        site = Site(*(model(name) for name in ("other", "ended", "having", "unloaded")))
        for name in ("other", "ended", "having"):
            await site.ask("POST", "/v1/models/load", {"model": name})
        site.answers |= {("other", path): 404, ("ended", path): httpx2.ReadError("gone")}
        assert await site.ask(method, f"{path}?limit=2") == (200, {"by": "having"})
        assert [process.received for process in site.processes.values()] == [[f"{method} {path}?limit=2"]] * 3
        site.answers["having", path] = 404
        status, reply = await site.ask(method, path)
        assert status == 404 and "resp_1" in reply["error"]["message"] and len(site.processes) == 3

    run(test)


def test_a_reply_is_resumed_by_the_model_that_began_it(tmp_path: Path) -> None:
    writer = ReplyJournal(tmp_path).begin("chatcmpl-1", {"kind": "server", "body": {"model": "second"}})
    assert writer is not None

    async def test() -> None:
        site, path = Site(model("first"), model("second"), replies=tmp_path), "/v1/replies/chatcmpl-1/resume"
        assert await site.ask("POST", path, {"after": 3}) == (200, {"by": "second"})
        assert site.processes["second"].received == [f"POST {path}"]
        status, reply = await Site(model("first")).ask("POST", path, {})
        assert (status, reply["error"]["code"]) == (404, "reply_not_found")

    run(test)


@pytest.mark.parametrize("managed", [True, False])
def test_models_are_pulled_and_deleted_where_that_is_permitted(managed: bool) -> None:
    def nothing(name: str) -> tuple[str, ...]:
        return (sys.executable, "-c", "")

    manager = ModelManager(nothing, nothing, lambda name: model("pulled", removable=name), os.environ)

    async def test() -> None:
        site = Site(model("first"), manager=manager if managed else None)
        pulled, _ = await site.ask("POST", "/api/pull", {"model": "org/repo", "stream": False})
        assert list(site.router.pool.slots) == ["first", *(["pulled"] if managed else [])]
        deleted, _ = await site.ask("DELETE", "/api/delete", {"model": "pulled"})
        assert list(site.router.pool.slots) == ["first"]
        assert (pulled == 200, deleted == 200) == (managed, managed)

    run(test)


@pytest.mark.parametrize(("method", "path"), MANAGING)
def test_models_are_changed_by_no_route_of_ollama_without_permission(method: str, path: str) -> None:
    async def test() -> None:
        site = Site(model("first"))
        status, reply = await site.ask(method, path, {"model": "org/repo"})
        assert status == 403 and f"{path}: this server does not change the models" in str(reply["error"])

    run(test)
