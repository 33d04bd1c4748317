"""Test `mycli launch`: agents get address, model and key; for a missing agent the error says how to install it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mycli.cli.command import Call
from mycli.cli.commands.launch import AGENTS, agent_setup
from mycli.cli.serving.local_server import started_server
from mycli.runtime.server.http.run_file import RunningServer, announced, running_servers
from tests.cli.commands.test_serve import process
from tests.support.command_line import Mycli

SCRIPT = """#!/bin/sh
echo "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL $ANTHROPIC_AUTH_TOKEN $OPENAI_API_BASE $OPENCODE_CONFIG_CONTENT $@" > "$OUT"
exit 7
"""

# Ends while its second process still reads a reply.
CLIENT = """#!{python}
import json, os, sys, urllib.request
begun, begin = os.pipe()
if os.fork():
    os.read(begun, 1)
    sys.exit(7)
fields = {{"model": "pico", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}}
request = urllib.request.Request(os.environ["OPENAI_API_BASE"] + "/completions", json.dumps(fields).encode())
request.add_header("content-type", "application/json")
with urllib.request.urlopen(request) as response, open(os.environ["OUT"], "wb") as out:
    out.write(response.readline())
    os.write(begin, b"x")
    for line in response:
        out.write(line)
"""


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """Create stand-ins for the agents that record their arguments and environment and exit with 7."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in AGENTS.values():
        (folder / agent.command).write_text(SCRIPT)
        (folder / agent.command).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(tmp_path / "out"), "MYCLI_API_KEY": ""}


@pytest.mark.parametrize("agent", AGENTS)
def test_a_missing_agent_is_refused_with_the_install_line(mycli: Mycli, tmp_path: Path, agent: str) -> None:
    done = mycli("launch", agent, "--model", "pico", env={"PATH": str(tmp_path)})
    assert done.returncode == 4 and AGENTS[agent].install in done.stderr


def test_mistakes_are_named(mycli: Mycli, programs: dict[str, str]) -> None:
    assert "one of: codex, claude, opencode, aider" in mycli("launch", "cursor").stderr
    assert "no server is running" in mycli("launch", "claude", env=programs).stderr


def test_the_error_of_a_model_that_cannot_be_served_is_shown(mycli_process: Mycli, programs: dict[str, str]) -> None:
    done = mycli_process("launch", "claude", "--model", "no-such-model", env=programs)
    assert done.returncode == 4 and "mycli search no-such-model" in done.stderr


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("", 5, "its server ended"),
        ("no JSON", 5, "its server ended"),
        ("[1]", 5, "its server ended"),
        ('{"error": {"message": "a cause", "hint": "a hint", "exit_code": 3}}', 3, "a hint"),
        ('{"error": {"message": "a cause"}}', 5, "a cause"),
    ],
)
def test_a_server_that_ends_is_an_error_below_its_notes(
    mycli: Mycli, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch, output: str, code: int, said: str
) -> None:
    line = ["sh", "-c", 'echo "a note" >&2; echo "$0"', output]
    monkeypatch.setattr(sys.modules[started_server.__module__], "command_line", lambda *words: line)
    done = mycli("launch", "claude", "--model", "pico", env=programs)
    assert done.returncode == code and said in done.stderr and done.stderr.startswith("serving pico\na note\n")


SERVES = """
trap 'echo later >&2; echo "warning: last" >&2; exit' TERM
echo first >&2; echo "warning: second" >&2
echo '{"url": "http://127.0.0.1:9"}'
read _
"""


@pytest.mark.parametrize(("quiet", "more"), [(True, []), (False, ["later", "warning: last"])])
def test_what_a_server_says_is_shown_until_it_serves_or_to_its_end(
    monkeypatch: pytest.MonkeyPatch, quiet: bool, more: list[str]
) -> None:
    monkeypatch.setattr(sys.modules[started_server.__module__], "command_line", lambda *words: ["sh", "-c", SERVES])
    said: list[str] = []
    out = SimpleNamespace(note=said.append, warn=lambda text: said.append(f"warning: {text}"))
    with started_server(cast(Call, SimpleNamespace(out=out)), "pico", quiet=quiet) as served:
        assert served["url"] == "http://127.0.0.1:9" and said == ["first", "warning: second"]
    assert said[2:] == more


def test_agents_run_on_the_server_that_runs(
    environment: dict[str, str], mycli_process: Mycli, programs: dict[str, str]
) -> None:
    with process(environment) as (_, port):
        url = f"http://127.0.0.1:{port}"
        for agent in AGENTS:
            done = mycli_process("launch", agent, "--", "--flag", "word", env=programs)
            assert done.returncode == 7, done.stderr
            given = Path(programs["OUT"]).read_text()
            assert url in given and "pico" in given and given.endswith("--flag word\n")
        shown = json.loads(mycli_process("launch", "claude", "--print", "--json", env=programs).stdout)
        assert shown["environment"]["ANTHROPIC_BASE_URL"] == url and shown["model"] == "pico"


def test_a_model_is_served_while_its_agent_runs(mycli_process: Mycli, programs: dict[str, str]) -> None:
    done = mycli_process("launch", "claude", "--model", "pico", "--ctx", "256", env=programs)
    assert done.returncode == 7, done.stderr
    assert "pico any" in Path(programs["OUT"]).read_text() and mycli_process("ps").stdout == ""


def test_a_reply_under_way_is_finished_when_the_agent_ends(mycli_process: Mycli, programs: dict[str, str]) -> None:
    program = Path(programs["PATH"].partition(":")[0]) / "aider"
    program.write_text(CLIENT.format(python=sys.executable))
    done = mycli_process("launch", "aider", "--model", "pico", "--ctx", "2048", env=programs)
    assert done.returncode == 7, done.stderr
    assert Path(programs["OUT"]).read_text().endswith("data: [DONE]\n\n")


def test_a_killed_launch_leaves_no_server(environment: dict[str, str], programs: dict[str, str]) -> None:
    program = Path(programs["PATH"].partition(":")[0]) / "aider"
    line = [sys.executable, "-m", "mycli.cli", "launch", "aider", "--model", "pico", "--ctx", "256"]
    program.write_text("#!/bin/sh\necho begun\nread line\n")
    child = subprocess.Popen(
        line, env={**environment, **programs}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == b"begun\n"
    folder = Path(environment["XDG_STATE_HOME"]) / "mycli" / "servers"
    (server,) = running_servers(folder)
    assert server.context == 256
    child.kill()
    child.communicate()
    limit = time.monotonic() + 120  # the server ends at once, and a machine may be busy
    while (ended := not running_servers(folder)) is False and time.monotonic() < limit:
        time.sleep(0.02)
    if not ended:
        os.kill(server.pid, signal.SIGKILL)
    assert ended


def test_codex_speaks_responses() -> None:
    setup = agent_setup("codex", "http://h:1", "m", "k")
    assert 'model_providers.mycli.base_url="http://h:1/v1"' in setup.arguments
    assert 'model_providers.mycli.wire_api="responses"' in setup.arguments
    assert setup.environment == {"MYCLI_API_KEY": "k"}


def test_an_agent_that_a_signal_ended_has_the_exit_code_of_a_shell(
    mycli: Mycli, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = nullcontext(("http://127.0.0.1:9", "pico"))
    monkeypatch.setattr(sys.modules[agent_setup.__module__], "_server", lambda call, model, context: server)
    program = Path(programs["PATH"].partition(":")[0]) / "aider"
    for script, code in (("kill -9 $$", 137), ("exit 0", 0), ("exit 3", 3)):
        program.write_text(f"#!/bin/sh\n{script}\n")
        assert mycli("launch", "aider", env=programs).returncode == code


def test_the_command_is_printed_as_a_shell_reads_it(
    mycli: Mycli, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = nullcontext(("http://127.0.0.1:9", "a model"))
    monkeypatch.setattr(sys.modules[agent_setup.__module__], "_server", lambda call, model, context: server)
    printed = mycli("launch", "claude", "--print", "--", "two words", env=programs).stdout
    words = shlex.split(printed)
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:9" in words and "ANTHROPIC_MODEL=a model" in words
    assert words[-1] == "two words" and Path(words[-2]).name == "claude" and not Path(programs["OUT"]).exists()


def test_sigterm_ends_the_agent_too(environment: dict[str, str], programs: dict[str, str]) -> None:
    program = Path(programs["PATH"].partition(":")[0]) / "aider"
    loop = "for _ in $(seq 200); do sleep 0.1; done"
    program.write_text(f"#!/bin/sh\ntrap 'echo ended; exit' TERM\necho begun\n{loop}\n")
    folder = Path(environment["XDG_STATE_HOME"]) / "mycli" / "servers"
    server = RunningServer(os.getpid(), "http://127.0.0.1:9", "pico", ("pico",), 64, 0, "1")  # this process lives
    with announced(folder, server):
        line = [sys.executable, "-m", "mycli.cli", "launch", "aider"]
        child = subprocess.Popen(line, env={**environment, **programs}, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"begun\n"
        child.terminate()
        assert child.wait(60) == 143 and child.stdout.read() == b"ended\n"
