"""Test the routes that a server for several models answers itself, without loading one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from mycli.runtime.server.http.settings import ServerLimits, ServerSettings
from mycli.runtime.server.router.application import Router, router_application
from mycli.runtime.server.router.model import RoutedModel
from mycli.runtime.server.router.pool import ModelPool, Slot

MODELS = (
    RoutedModel(("first", "alias"), (), Path("/nowhere"), nbytes=7, context=64, created=1, pinned=True),
    RoutedModel(("second",), (), Path("/nowhere"), problem="its files are damaged"),
)


@pytest.fixture
def router() -> Router:
    pool = ModelPool(MODELS, {"cpu": 9}, ServerLimits(), None, print)  # type: ignore[arg-type]  # nothing is loaded
    return Router(ServerSettings(("first",)), pool)


def get(router: Router, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    application = router_application(router, lambda line: None)

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await application({**scope, "state": {}}, receive, send)

    async def ask() -> httpx2.Response:
        transport = httpx2.ASGITransport(with_state)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            sent = {key.replace("_", "-"): value for key, value in headers.items()}
            return await client.request("GET" if body is None else "POST", path, json=body, headers=sent)

    answer = asyncio.run(ask())
    return answer.status_code, answer.json()


def test_health_is_200_until_the_shutdown_begins(router: Router) -> None:
    body = {"status": "ok", "running": 0, "waiting": 0, "models": {"first": "unloaded", "second": "failed"}}
    assert get(router, "/health") == (200, body)
    router.draining = True
    assert get(router, "/health") == (503, {**body, "status": "draining"})


def test_models_are_listed_under_all_their_names_in_both_forms(router: Router) -> None:
    status, listed = get(router, "/v1/models")
    assert status == 200 and listed["object"] == "list"
    assert [(entry["id"], entry["root"]) for entry in listed["data"]] == [
        ("first", "first"),
        ("alias", "first"),
        ("second", "second"),
    ]
    assert get(router, "/v1/models/alias") == (200, listed["data"][1]) and listed["data"][1]["memory_bytes"] == 7
    assert [entry["error"] for entry in listed["data"]] == [None, None, "its files are damaged"]
    _, other = get(router, "/v1/models", anthropic_version="2023-06-01")
    assert [entry["id"] for entry in other["data"]] == ["first", "alias", "second"]
    assert (other["first_id"], other["last_id"], other["has_more"]) == ("first", "second", False)
    assert get(router, "/v1/models/first", anthropic_version="2023-06-01") == (200, other["data"][0])
    assert other["data"][0]["created_at"] == "1970-01-01T00:00:01Z" and other["data"][0]["max_tokens"] == 64


def test_nothing_runs_before_a_model_is_loaded(router: Router) -> None:
    assert get(router, "/api/ps") == (200, {"models": []})
    assert [entry["name"] for entry in get(router, "/api/tags")[1]["models"]] == ["first", "alias", "second"]


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_a_model_that_is_not_loaded_is_not_loaded_to_be_unloaded(router: Router, path: str) -> None:
    status, reply = get(router, path, {"model": "alias:latest", "keep_alive": 0})
    assert status == 200 and (reply["model"], reply["done"], reply["done_reason"]) == ("alias:latest", True, "unload")
    assert reply["response" if path.endswith("generate") else "message"] is not None
    assert router.pool.waiting == 0 and router.pool.slots["first"].loads == 0


@pytest.mark.parametrize("path", ["/v2/rerank", "/reranking", "/v1/reranking"])
def test_the_paths_of_other_servers_are_forwarded(router: Router, path: str) -> None:
    status, reply = get(router, path, {"model": "second", "query": "a", "documents": ["b"]})
    assert status != 404 and "its files are damaged" in reply["error"]["message"]


def test_a_server_for_one_model_has_a_description(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ModelPool(MODELS[:1], {"cpu": 9}, ServerLimits(), None, print)  # type: ignore[arg-type]  # nothing is loaded

    @asynccontextmanager
    async def loaded(slot: Slot) -> AsyncIterator[Any]:
        sent = {"info": {}, "components": {"schemas": {"Chat": {"properties": {"model": {}}}}}}
        description = httpx2.MockTransport(lambda request: httpx2.Response(200, json=sent))
        async with httpx2.AsyncClient(transport=description, base_url="http://model") as client:
            yield SimpleNamespace(client=client)

    monkeypatch.setattr(pool, "use", loaded)
    status, shown = get(Router(ServerSettings(("first",)), pool), "/openapi.json")
    assert status == 200 and shown["info"] == {"title": "mycli"}
    assert shown["components"]["schemas"]["Chat"]["properties"]["model"] == {"enum": ["first", "alias", None]}
