"""Test `mycli ps` and `mycli stop`, which list and end the servers of this user."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mycli.cli.command import Call
from mycli.cli.commands.ps import _duration, _models
from mycli.cli.serving.local_server import listed
from mycli.runtime.server.http.run_file import RunningServer, running_servers
from tests.cli.commands.test_serve import begin, process
from tests.support.command_line import Mycli

SERVER = RunningServer(1, "http://127.0.0.1:9", "m", ("m",), 512, 1, "0")


@pytest.mark.parametrize("writable", [True, False])
def test_a_server_that_cannot_be_listed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    state = tmp_path / "state"
    if not writable:
        state.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    warnings: list[str] = []
    with listed(cast(Call, SimpleNamespace(out=SimpleNamespace(warn=warnings.append))), SERVER):
        assert len(running_servers(state / "mycli" / "servers")) == writable
    assert len(warnings) == (not writable) and all("neither mycli ps nor mycli stop" in line for line in warnings)


@pytest.mark.parametrize("name", [pytest.param([], marks=pytest.mark.slow), ["first"]], ids=["the only one", "by name"])
def test_servers_are_listed_and_stopped(environment: dict[str, str], mycli: Mycli, name: list[str]) -> None:
    assert mycli("ps").stdout == "" and mycli("stop").returncode == 4
    with process(environment, "--alias", "first", "--log-format", "json") as (one, port):
        with process(environment) as (two, other):
            servers = json.loads(mycli("ps", "--json").stdout)["servers"]
            assert [(server["model"], server["pid"], server["state"]) for server in servers] == [
                ("first", one.pid, "ok"),
                ("pico", two.pid, "ok"),
            ]
            assert "first" in mycli("ps").stdout
            several = mycli("stop", "pico")  # the model's name also equals the first one's
            assert several.returncode == 2 and str(port) in several.stderr
            two.send_signal(signal.SIGKILL)
            two.wait()
            assert len(json.loads(mycli("ps", "--json").stdout)["servers"]) == 1
            assert mycli("stop", str(other)).returncode == 4
        response = begin(port)
        done = mycli("stop", *name)
        assert done.returncode == 0 and done.stdout.startswith("stopped first at http://")
        assert response.read().endswith(b"data: [DONE]\n\n") and one.wait(20) == 143
        assert one.stderr is not None
        lines = [json.loads(line) for line in one.stderr.read().splitlines() if line.startswith("{")]
        assert [line["route"] for line in lines if line["method"] == "POST"] == ["/v1/completions"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59, "0:00:59"), (3599, "0:59:59"), (3600, "1:00:00"), (90_061, "25:01:01")]
)
def test_the_time_that_a_server_is_up(seconds: int, text: str) -> None:
    assert _duration(seconds) == text


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ({}, "one"),
        ({"a": "loaded", "b": "loading"}, "a, b (loading)"),
        ({"a": "loaded", "b": "unloaded", "c": "unloaded"}, "a, 3 models"),
        ({"a": "unloaded", "b": "unloaded"}, "2 models"),
    ],
    ids=["single", "all-in-memory", "some", "none"],
)
def test_the_models_of_a_server(states: dict[str, str], text: str) -> None:
    assert _models({"models": states, "model": "one"}) == text
