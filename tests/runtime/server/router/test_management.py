"""Test pulling and deleting models over Ollama's interface: commands run it, and their errors reach the client."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.settings import ServerLimits
from mycli.runtime.server.router.management import ModelManager, pull_response
from mycli.runtime.server.router.model import RoutedModel
from mycli.runtime.server.router.pool import ModelPool

FAILS = 'import json, sys; print(json.dumps({"error": {"message": "the disk is full"}})); sys.exit(5)'


def model(name: str, removable: str = "") -> RoutedModel:
    return RoutedModel((name,), (), Path("/nowhere"), removable=removable)


def manager(tmp_path: Path, fails: bool = False) -> ModelManager:
    script = FAILS if fails else "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + ';')"

    def command(*words: str) -> tuple[str, ...]:
        return (sys.executable, "-c", script, str(tmp_path / "called"), *words)

    return ModelManager(
        lambda name: command("pull", name),
        lambda name: command("rm", name),
        lambda name: model("repo", name),
        os.environ,
    )


def make_pool(*models: RoutedModel) -> ModelPool:
    return ModelPool(models, {"cpu": 1}, ServerLimits(), None, print)  # type: ignore[arg-type]  # nothing is loaded


async def states(response: Any) -> list[dict[str, Any]]:
    body = b"".join([part async for part in response.body_iterator])
    return [json.loads(line) for line in body.splitlines()]


def test_a_pulled_model_is_served_and_deleted(tmp_path: Path) -> None:
    async def test() -> None:
        pool, chosen = make_pool(model("first")), manager(tmp_path)
        answer = await states(pull_response(chosen, pool, {}, "org/repo"))
        assert answer == [{"status": "pulling manifest"}, {"status": "success"}]
        assert pool.find("repo").model.removable == "org/repo"
        await chosen.removed(pool, "repo")
        assert (tmp_path / "called").read_text() == "pull org/repo;rm org/repo;" and set(pool.slots) == {"first"}

    asyncio.run(test())


def test_errors_of_the_command_are_the_answer(tmp_path: Path) -> None:
    async def test() -> None:
        pool, chosen = make_pool(model("first"), model("stored", "org/stored")), manager(tmp_path, fails=True)
        assert (await states(pull_response(chosen, pool, {"stream": False}, "org/repo"))) == [
            {"error": "the disk is full"}
        ]
        with pytest.raises(ApiError, match="was not pulled or quantized by mycli"):
            await chosen.removed(pool, "first")
        with pytest.raises(ApiError, match="the disk is full"):
            await chosen.removed(pool, "stored")

    asyncio.run(test())


@pytest.mark.parametrize("name", [None, "llama3", "--force/x", "/etc/passwd", "../a/b", "./a"])
def test_only_names_of_the_hub_are_pulled(tmp_path: Path, name: str | None) -> None:
    with pytest.raises(ApiError, match="is not a name such as org/repo"):
        pull_response(manager(tmp_path), make_pool(model("first")), {}, name)
