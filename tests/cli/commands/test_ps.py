"""Test `mycli ps` and `mycli stop`: servers register in files, and files of killed servers are recognized."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mycli.cli.command import Call
from mycli.cli.commands.ps import _duration, _models
from mycli.cli.serving.local_server import listed
from mycli.runtime.server.http.run_file import RunningServer, announced, running_servers
from tests.cli.commands.test_serve import begin, process
from tests.support.command_line import Mycli

SERVER = RunningServer(1, "http://127.0.0.1:9", "m", ("m",), 512, 1, "0")


def test_a_file_is_there_while_the_server_runs(tmp_path: Path) -> None:
    folder = tmp_path / "servers"
    with announced(folder, SERVER):
        assert running_servers(folder) == [SERVER]
        assert (folder / "1.json").stat().st_mode & 0o777 == 0o600
    assert running_servers(folder) == [] and not list(folder.iterdir())


def test_the_oldest_server_is_first_whatever_its_process_number(tmp_path: Path) -> None:
    servers = [replace(SERVER, pid=pid, started=started) for pid, started in ((7, 3), (991, 4), (1005, 4))]
    with announced(tmp_path, servers[0]), announced(tmp_path, servers[1]), announced(tmp_path, servers[2]):
        for order in ([7, 991, 1005], [7, 1005, 991]):
            for moment, pid in enumerate(order):
                os.utime(tmp_path / f"{pid}.json", (moment, moment))
            assert [server.pid for server in running_servers(tmp_path)] == order


def test_the_file_of_a_server_without_standard_input_is_removed(tmp_path: Path) -> None:
    """Descriptor 0 is free if a program starts it with a closed standard input."""
    stdin = os.dup(0)
    os.close(0)
    try:
        with announced(tmp_path, SERVER):
            assert os.path.samestat(os.fstat(0), (tmp_path / "1.json").stat())
        assert not list(tmp_path.iterdir())
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)


def test_a_file_that_was_left_behind_is_removed(tmp_path: Path) -> None:
    """The file of a killed server is removed: its process id may belong to another process."""
    (tmp_path / f"{os.getpid()}.json").write_text(json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:1"}))
    (tmp_path / "7.json").write_text("{")
    with announced(tmp_path, SERVER):
        assert running_servers(tmp_path) == [SERVER]
        assert [path.name for path in tmp_path.iterdir()] == ["1.json"]


def test_a_folder_that_cannot_be_written_is_no_reason_not_to_serve(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with announced(tmp_path / "file", SERVER) as problem:
        assert running_servers(tmp_path / "file") == [] and problem == "File exists"


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
