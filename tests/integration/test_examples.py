"""Run every example of every --help, in its order on the page, with one home folder for each command."""

import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from mycli.cli.commands import compare
from mycli.cli.main import COMMANDS, main
from mycli.runtime.diagnostics import golden_record, speculation_benchmark, throughput
from mycli.runtime.speculative.draft_length import draft_lengths
from tests.support.forked import ForkedProcess
from tests.support.models import shorten_report

pytestmark = [pytest.mark.usefixtures("short_calibration_text"), pytest.mark.typed]

NEEDS = re.compile("# needs ")  # the network, a program, or a downloaded model


def parse(line: str) -> tuple[str, list[str]]:
    words = shlex.split(line)
    typed = ""
    if words[0] == "echo":
        bar = words.index("|")
        typed, words = " ".join(words[1:bar]) + "\n", words[bar + 1 :]
    assert words[0] == "mycli", f"not an example of mycli: {line}"
    return typed, words[1:]


@pytest.fixture
def terminal(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set a user's environment in this process: torch is imported once for all examples."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for key in os.environ.keys() - environment.keys():
        if key.startswith("MYCLI_"):  # such as MYCLI_HOME, which README says to export
            monkeypatch.delenv(key)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MYCLI_DEVICE", "cpu")
    shorten_report(monkeypatch, 512)
    monkeypatch.setattr(throughput, "MEASURED_BYTES", 1 << 24)  # reading more takes longer than all examples
    monkeypatch.setattr(speculation_benchmark, "SIMULATED_PASSES", 20)  # as above, and the following
    monkeypatch.setattr(speculation_benchmark, "draft_lengths", lambda *costs: draft_lengths(*costs)[:2])
    for name, value in {"SECONDS": 0.01, "SAMPLE_SECONDS": 0.005, "TIMED_TOKENS": 16, "FEWEST_SAMPLES": 2}.items():
        monkeypatch.setattr(golden_record, name, value)
    monkeypatch.setattr(golden_record, "BUSY", -1.0)  # so short a measurement is not significant
    built_in = compare._built_in_prompts
    monkeypatch.setattr(compare, "_built_in_prompts", lambda: built_in()[:3])
    config = Path(environment["XDG_CONFIG_HOME"]) / "mycli" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("[quantize]\nseq = 64\n")  # shorter calibration windows; no example sets them
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def serve(words: list[str]) -> None:
    line = [sys.executable, "-m", "mycli.cli", *words, "--port", "0"]
    with ForkedProcess(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("http://127.0.0.1:")
        server.terminate()
        assert server.wait(30) == 143


def stop(words: list[str]) -> None:
    line = [sys.executable, "-m", "mycli.cli", "serve", "pico", "--port", "0"]
    with ForkedProcess(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline().startswith("http://127.0.0.1:")
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0 and server.wait(30) == 143


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("terminal")
def test_examples_run(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = import_module(f"mycli.cli.commands.{COMMANDS[name][0]}").EXAMPLES
    for line in (step for whole in lines if not NEEDS.search(whole) for step in whole.split(" && ")):
        typed, words = parse(line)
        if name in ("quantize", "eval") and words[1] == "pico":
            words[1] = "pico-draft"  # an eighth of the size
        if "--verify" in words:  # measures a process of its own: `test_estimate` runs this example
            continue
        if words[0] == "serve":  # until it is stopped
            serve(words)
            continue
        if words == ["stop", "pico"]:
            stop(words)
            continue
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0, f"{line}\n{capsys.readouterr().err}"
