"""Test third-party agents from their registries against a random model (-m slow).

A proxy forces a tool call in the first turn, so that the whole loop of each client runs.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.server.http.settings import ServerSettings
from mycli.runtime.server.ollama.card import model_card
from tests.support.agent_model import CONTEXT, agent_model
from tests.support.clients.python_clients import CLIENTS
from tests.support.forcing_proxy import Exchange, proxy
from tests.support.paths import ROOT
from tests.support.served import Served, serving

pytestmark = pytest.mark.slow
SCRIPTS = ROOT / "tests" / "support" / "clients"
INSTALL_SECONDS = 900  # a client that takes longer on a busy machine is skipped
JAVASCRIPT = (
    "openai",
    "@anthropic-ai/sdk",
    "@ai-sdk/openai",
    "@ai-sdk/openai chat",
    "@ai-sdk/openai-compatible",
    "@ai-sdk/anthropic",
)
# Agent -> its package, its command, and the forced tool (None: any of its tools).
AGENTS: dict[str, tuple[str, list[str], str | None]] = {
    "codex": ("@openai/codex", ["codex", "exec", "--skip-git-repo-check", "--sandbox", "read-only"], None),
    "claude": ("@anthropic-ai/claude-code", ["claude", "--output-format", "json", "-p"], "Read"),
    "qwen": ("@qwen-code/qwen-code", ["qwen", "--auth-type", "openai", "-p"], None),
    "opencode": ("opencode-ai", ["opencode", "run", "--model", "mycli/agent"], None),
    "continue": ("@continuedev/cli", ["cn", "--config", "continue.yaml", "--auto", "-p"], "List"),
}
_CONTINUE = """name: mycli
version: 0.0.1
schema: v1
models:
  - {{name: agent, provider: openai, model: agent, apiBase: "{address}/v1", apiKey: any, capabilities: [tool_use]}}
"""


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = open_model_folder(agent_model(tmp_path_factory.mktemp("agents") / "model"))
    loaded = LoadedModel.load(folder, EngineConfig(device="cpu").place(folder.config))
    engine = Engine(loaded.runner, CacheShape.paged(CONTEXT, CONTEXT * 2, 16), loaded.vocabulary_size, running=4)
    with serving(loaded, engine, ServerSettings(("agent",), card=model_card(folder))) as served:
        yield served


def run(command: Sequence[str], folder: Path, seconds: float, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPENAI", "ANTHR"))
    }
    return subprocess.run(
        command,
        cwd=folder,
        # PWD: opencode looks there for its settings.
        env={**inherited, "HOME": str(folder), "PWD": str(folder), "OPENAI_API_KEY": "any", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def install(command: Sequence[str], folder: Path) -> None:
    try:
        done = run(command, folder, INSTALL_SECONDS, HOME=os.environ.get("HOME", str(folder)))
    except subprocess.TimeoutExpired:
        pytest.skip(f"not installed within {INSTALL_SECONDS} s")
    if done.returncode:
        pytest.skip(f"cannot be installed here: {done.stderr[-200:]}")


def print_result(name: str, folder: Path, packages: Sequence[str], passed: Sequence[Exchange]) -> None:
    versions = []
    for package in (re.split(r"[\[@=]", package)[0] or package for package in packages):
        stem = re.sub(r"[-.]", "_", package)
        for path in folder.glob(f"venv/lib/python*/site-packages/{stem}-*.dist-info"):
            versions.append(f"{package} {path.name.removesuffix('.dist-info').rpartition('-')[2]}")
    for package in packages:
        path = folder / "node_modules" / package / "package.json"
        if path.exists():
            versions.append(f"{package} {json.loads(path.read_text())['version']}")
    routes = ", ".join(sorted({exchange.path.partition("?")[0] for exchange in passed}))
    forced = sum(exchange.forced for exchange in passed)
    print(f"| {name} | {', '.join(versions)} | completes | {len(passed)} requests, {forced} forced | {routes} |")


def check(passed: Sequence[Exchange], forced: bool) -> None:
    assert passed and {exchange.status for exchange in passed} <= {200, 404}  # some request pages of hosted services
    assert not forced or any(exchange.forced for exchange in passed)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_python_client(agent_server: Served, tmp_path: Path, name: str) -> None:
    _, packages, loops = CLIENTS[name]
    run([sys.executable, "-m", "venv", "--without-pip", "venv"], tmp_path, 60)
    python = str(tmp_path / "venv" / "bin" / "python")
    install([sys.executable, "-m", "pip", "--python", python, "install", "-q", *packages], tmp_path)
    with proxy(agent_server.port) as (port, passed):
        address = f"http://127.0.0.1:{port}"
        done = run([python, str(SCRIPTS / "python_clients.py"), name, address, "agent"], tmp_path, 180)
        assert done.returncode == 0 and "completed" in done.stdout, done.stderr[-2000:]
        if not name.startswith("litellm"):  # which also checks for the error of a long prompt
            check(passed, loops)
        print_result(name, tmp_path, packages, passed)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("npm")
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    (folder / "package.json").write_text('{"private": true}')
    return folder


@pytest.mark.parametrize("name", JAVASCRIPT)
def test_a_javascript_client(agent_server: Served, packages: Path, name: str) -> None:
    wanted = [name.split()[0], *(["ai@6", "zod"] if name.startswith("@ai-sdk") else [])]
    install(["npm", "install", "--no-audit", "--no-fund", *wanted], packages)
    with proxy(agent_server.port) as (port, passed):
        script = [str(SCRIPTS / "javascript_clients.mjs"), name, f"http://127.0.0.1:{port}", "agent"]
        done = run(["node", *script], packages, 120)
        assert done.returncode == 0 and "completed" in done.stdout, done.stderr[-2000:]
        check(passed, True)
        print_result(name, packages, [package.partition("@6")[0] for package in wanted], passed)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_calls_its_tool_and_answers(agent_server: Served, packages: Path, tmp_path: Path, name: str) -> None:
    package, command, tool = AGENTS[name]
    install(["npm", "install", "--no-audit", "--no-fund", package], packages)
    with proxy(agent_server.port, tool) as (port, passed):
        address = f"http://127.0.0.1:{port}"
        environment = _configured(name, tmp_path, address)
        program = str(packages / "node_modules" / ".bin" / command[0])
        done = run([program, *command[1:], "List the files."], tmp_path, 180, **environment)
        assert done.returncode == 0 and "The" in done.stdout, (done.stdout + done.stderr)[-2000:]
        check(passed, True)
        print_result(name, packages, [package], passed)


def _configured(name: str, folder: Path, address: str) -> dict[str, str]:
    if name == "codex":
        (folder / ".codex").mkdir()
        (folder / ".codex" / "config.toml").write_text(
            'model = "agent"\nmodel_provider = "mycli"\n[model_providers.mycli]\nname = "mycli"\n'
            f'base_url = "{address}/v1"\nwire_api = "responses"\n'
        )
    if name == "claude":
        names = {"ANTHROPIC_MODEL": "agent", "ANTHROPIC_SMALL_FAST_MODEL": "agent", "ANTHROPIC_API_KEY": "any"}
        return {**names, "ANTHROPIC_BASE_URL": address, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    if name == "continue":
        (folder / "continue.yaml").write_text(_CONTINUE.format(address=address))
        return {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_ALLOW_ANONYMOUS_TELEMETRY": "0"}
    if name == "opencode":
        provider: dict[str, Any] = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "mycli",
            "options": {"baseURL": f"{address}/v1", "apiKey": "any"},
            "models": {"agent": {"name": "agent"}},
        }
        config = {"provider": {"mycli": provider}, "model": "mycli/agent", "small_model": "mycli/agent"}
        (folder / "opencode.json").write_text(json.dumps({"$schema": "https://opencode.ai/config.json", **config}))
        run(["git", "init", "-q"], folder, 60)  # where it looks for its settings
        return {}
    return {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_MODEL": "agent"}
