"""Test `mycli serve` with several models, as processes: states, failures of one model, and clean shutdown."""

import http.client
import io
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.command import Call
from mycli.cli.flags.address import AddressFlags
from mycli.cli.flags.options import option_words
from mycli.cli.flags.records import LoadFlags
from mycli.cli.flags.several import SeveralModelsFlags, setting_words
from mycli.cli.output import Output
from mycli.cli.serving.model_catalog import Catalog, ModelRequest, requested_models
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import UsageError
from mycli.runtime.memory.estimate import estimate
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.server.application import ROUTES
from mycli.runtime.server.router.application import ROUTER_ROUTES
from mycli.runtime.server.router.model import RoutedModel
from tests.support.command_line import COMMAND, Mycli, default_signals
from tests.support.paths import PICO


@contextmanager
def several(environment: dict[str, str], *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    child = subprocess.Popen(
        [*COMMAND, "serve", *arguments, "--port", "0", "--device", "cpu", "--json"],
        env=environment,
        cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    )
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line, child.communicate()
        yield child, int(json.loads(line)["url"].rpartition(":")[2])
    finally:
        child.kill()
        child.communicate()


def ask(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    data = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, data, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def complete(port: int, model: str, tokens: int = 4) -> tuple[int, Any]:
    return ask(port, "/v1/completions", {"model": model, "prompt": "Once", "max_tokens": tokens, "temperature": 0})


def states(port: int) -> dict[str, str]:
    return {model["id"]: model["state"] for model in ask(port, "/v1/models")[1]["data"]}


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    """Create two copies of pico, one with a damaged tokenizer that fails on load, and a folder that is not a model."""
    folder = tmp_path / "served"
    for name in ("good", "damaged"):
        shutil.copytree(PICO, folder / name)
    (folder / "damaged" / "tokenizer.json").write_text("{")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "config.json").write_text('{"model_type": "nosuch"}')
    return folder


def test_a_model_that_fails_takes_no_other_with_it(environment: dict[str, str], mycli: Mycli, models_dir: Path) -> None:
    arguments = ("pico", "--models-dir", str(models_dir), "--memory", "1GiB", "--ctx", "512")
    with several(environment, *arguments) as (router, port):
        assert states(port) == {"pico": "unloaded", "damaged": "unloaded", "foreign": "failed", "good": "unloaded"}
        alone = complete(port, "pico")
        assert alone[0] == 200
        assert complete(port, "nosuch")[0] == 404
        for name, words in (("damaged", "tokenizer.json"), ("foreign", "nosuch")):
            status, answer = complete(port, name)
            assert status == 503 and answer["error"]["code"] == "model_load_failed", answer
            assert words in answer["error"]["message"]
        (worker,) = children(router.pid)
        assert "torch" not in Path(f"/proc/{router.pid}/maps").read_text()
        assert "torch" in Path(f"/proc/{worker}/maps").read_text()

        # kill -9 of a model's process: its stream ends with an error, and the next request restarts it.
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        body = {
            "model": "pico",
            "prompt": "Once",
            "max_tokens": 500,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
        }
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        begun = response.readline()
        os.kill(worker, signal.SIGKILL)
        rest = response.read()
        assert b"model_process_ended" in rest and b"SIGKILL" in rest and rest.endswith(b"data: [DONE]\n\n")
        assert complete(port, "pico")[1]["choices"] == alone[1]["choices"]

        # The reply is resumed by the model that began it.
        name = json.loads(begun.partition(b"\n")[0].removeprefix(b"data: "))["id"]
        status, resumed = ask(port, f"/v1/replies/{name}/resume", {"stream": False})
        whole = ask(port, "/v1/completions", {**body, "stream": False})[1]
        assert status == 200 and resumed["id"] == name and resumed["model"] == "pico"
        assert resumed["choices"] == whole["choices"] and resumed["usage"]["completion_tokens"] == 500
        assert ask(port, "/v1/replies/cmpl-0/resume", {})[0] == 404

        # A stored response is looked for in the models that are loaded.
        response = ask(port, "/v1/responses", {"model": "pico", "input": "Hi", "max_output_tokens": 1})[1]
        assert ask(port, f"/v1/responses/{response['id']}") == (200, response)
        status, answer = ask(port, "/v1/responses/resp_0/input_items")
        assert (status, answer["error"]["code"]) == (404, "response_not_found")

        (listed,) = json.loads(mycli("ps", "--json").stdout)["servers"]
        assert listed["several"] and listed["models"]["pico"] == "loaded"
        assert "pico, damaged (failed), foreign (failed), 4 models" in mycli("ps").stdout
        assert "damaged is unloaded" in mycli("stop", "damaged").stdout

        # kill -9 of the router: the model processes exit by themselves.
        (worker,) = children(router.pid)
        router.kill()
        assert gone(worker)


def test_the_end_of_the_server_ends_its_models(environment: dict[str, str], mycli: Mycli) -> None:
    config = Path(environment["XDG_CONFIG_HOME"]) / "mycli"
    config.mkdir(parents=True, exist_ok=True)
    text = '[models.first]\nmodel = "pico"\nctx = 256\npin = true\nalias = "a, other"\n'
    text += '[models.pico-draft]\nidle = "1h"\n'
    (config / "config.toml").write_text(text)
    with several(environment, "-v") as (router, port):
        status, answer = complete(port, "other")
        assert status == 200 and answer["model"] == "other"
        assert ask(port, "/tokenize", {"prompt": "a"})[1]["max_model_len"] == 256
        (listed,) = json.loads(mycli("ps", "--json").stdout)["servers"]
        assert listed["context"] == 2048  # pico-draft has the longest
        workers = children(router.pid)
        assert "first is unloaded" in mycli("stop", "first").stdout
        router.send_signal(signal.SIGTERM)
        assert router.wait(20) == 143 and all(gone(worker) for worker in workers)
        assert router.stderr is not None
        (line,) = [line for line in router.stderr.read().splitlines() if "POST /v1/completions" in line]
        assert "127.0.0.1" in line and "completion 4" in line


def test_every_route_of_one_model_is_one_of_several() -> None:
    own = {(method, path) for method, path, _ in ROUTER_ROUTES}
    assert {(method, path) for method, path, _ in ROUTES} <= own


def test_options_are_passed_to_the_process_of_a_model() -> None:
    words = option_words(LoadFlags(context=512, expert_memory=1 << 20, allow_nonfinite=True))
    assert words == ["--expert-memory", "1048576B", "--ctx", "512", "--allow-nonfinite"]
    settings = {"ctx": "8k", "shadow": True, "allow_nonfinite": False, "alias": ["a", "b"]}
    assert setting_words(settings) == ["--ctx", "8k", "--shadow", "--alias", "a", "--alias", "b"]


def test_models_of_a_folder_are_found(tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (models_dir / "org").mkdir()
    shutil.copytree(PICO, models_dir / "org" / "nested")
    for name in ("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", ".hidden.gguf"):
        (models_dir / name).write_bytes(b"")
    found = [request.name for request in requested_models([], SeveralModelsFlags(models_dir=models_dir))]
    assert found == ["a", "b-00001-of-00002", "damaged", "foreign", "good", "nested"]
    with pytest.raises(UsageError, match="no model to serve"):
        requested_models([], SeveralModelsFlags())


def test_names_with_commas_reach_the_process_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Catalog, "_plan", lambda *_: (64, 1 << 20, None))
    monkeypatch.setenv("MYCLI_DEVICE", "cpu")
    call = Call(Output(stdout=io.StringIO(), stderr=io.StringIO()), offline=True)
    catalog = Catalog(call, AddressFlags(), SeveralModelsFlags(), (), tmp_path)
    model = catalog.routed_model(ModelRequest("x,y", "pico", {"alias": "a, b"}), "0", {})
    assert model.names == ("x,y", "a", "b")
    assert " --alias x,y --alias a --alias b " in " ".join(model.command)


@pytest.mark.parametrize(
    ("source", "removable"),
    [("org/name", "org/name"), ("qwen", "qwen"), ("pico", ""), ("./folder", ""), ("/models/a.gguf", "")],
)
def test_only_downloaded_models_can_be_removed_by_clients(
    source: str, removable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Catalog, "_plan", lambda *_: (64, 1 << 20, None))
    monkeypatch.setenv("MYCLI_DEVICE", "cpu")
    call = Call(Output(stdout=io.StringIO(), stderr=io.StringIO()), offline=True)
    catalog = Catalog(call, AddressFlags(), SeveralModelsFlags(), (), tmp_path)
    assert catalog.routed_model(ModelRequest("name", source, {}), "0", {}).removable == removable


def test_a_model_gets_the_memory_that_the_router_and_its_server_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYCLI_DEVICE", "cpu")
    call = Call(Output(stdout=io.StringIO(), stderr=io.StringIO()), offline=True)

    def routed(memory: int, *words: str) -> tuple[RoutedModel, int]:
        words, rooms = ("--max-sequences", "1", *words), dict[str, int]()
        catalog = Catalog(call, AddressFlags(), SeveralModelsFlags(memory=memory), words, tmp_path)
        return catalog.routed_model(ModelRequest("pico", "pico", {}), "0", rooms), rooms["cpu"]

    needed = routed(1 << 40, "--ctx", "512")[0].nbytes
    config = open_model_folder(PICO).config
    assert needed == estimate(MemoryPlan(config, context=512, running=1)).total + (96 << 20)
    for less, context in ((0, 512), (1, 496)):
        model, room = routed(needed + (64 << 20) - less)
        assert (model.context, room) == (context, needed - less)
        assert f"--memory {room - (96 << 20)}B" in " ".join(model.command)


def test_a_model_is_pinned_by_its_settings_or_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Catalog, "_plan", lambda *_: (64, 1 << 20, None))
    call = Call(Output(stdout=io.StringIO(), stderr=io.StringIO()), offline=True)
    catalog = Catalog(call, AddressFlags(), SeveralModelsFlags(pinned=["org/named"]), (), tmp_path)
    for name, settings, pinned in (
        ("named", {}, True),
        ("set", {"pin": True}, True),
        ("neither", {"pin": False}, False),
    ):
        assert catalog.routed_model(ModelRequest(name, "pico", settings), "0", {}).pinned is pinned


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pico", "pico"), "two models are called pico"),
        (("pico", "pico-draft", "--pin", "nosuch"), "--pin nosuch: not one of the models"),
        (("pico", "pico-draft", "--idle", "soon"), "--idle: 'soon' is not a time"),
        (("pico", "nosuch-model"), "nosuch-model"),
        ((), "no model to serve"),
        (("pico", "pico-draft", "--engine", "vllm"), "vLLM serves one model"),
    ],
)
def test_mistakes_are_named(mycli: Mycli, arguments: tuple[str, ...], words: str) -> None:
    done = mycli("serve", *arguments, "--port", "0")
    assert done.returncode in (2, 4) and words in done.stderr, done.stderr


def test_an_invalid_value_in_the_table_of_a_model_is_named_by_its_key(
    mycli: Mycli, environment: dict[str, str]
) -> None:
    path = Path(environment["XDG_CONFIG_HOME"]) / "mycli" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text('[models.first]\nmodel = "pico"\nctx = "long"\n')
    assert mycli("serve").stderr.startswith("error: [models.first] ctx: 'long' is not a count")
