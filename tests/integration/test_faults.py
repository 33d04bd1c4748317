"""Test faults from their origin to the exit code, and that every fault of the table has a test."""

import io
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mycli.cli.command import Call, guarded
from mycli.cli.main import main
from mycli.cli.output import Output
from mycli.cli.replies.batch_file import run_batch
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.errors import ExitCode
from tests.support.command_line import Mycli
from tests.support.hub_server import Fault, HubServer, hub_server
from tests.support.paths import DRAFT, ROOT

REPO = "org/model"
FILES = {path.name: path.read_bytes() for path in DRAFT.iterdir()}
# Weight files, configurations, tokenizers and templates, disk and processes, quantization, generation, the server.
FAULTS = {"A": 33, "B": 19, "C": 22, "D": 21, "E": 11, "F": 17, "G": 43}


def test_every_fault_has_a_test_that_names_it() -> None:
    """The test searches for the number in case ids, test names and docstrings."""
    number = re.compile(r"\b([A-G]\d{1,2})\b|(?<=[_\"])([a-g]\d{1,2})(?=_|-[a-z])")
    numbers = (match for path in (ROOT / "tests").rglob("*.py") for match in number.findall(path.read_text()))
    named = {(upper or lower).upper() for upper, lower in numbers}
    assert {f"{part}{index + 1}" for part, last in FAULTS.items() for index in range(last)} <= named


@pytest.mark.parametrize("cause", ["device-side assert triggered", "unspecified launch failure"])
def test_a_gpu_that_fails_ends_everything_with_one_line(cause: str, tmp_path: Path) -> None:
    """F12. No further line of a batch is tried: after such an error every call on the device fails."""
    requests = []

    def answer(prompts: Iterator[object]) -> Iterator[dict[str, object]]:
        requests.append(next(prompts))
        raise torch.AcceleratorError(f"CUDA error: {cause}\nCompile with `TORCH_USE_CUDA_DSA`")

    source = tmp_path / "in.jsonl"
    source.write_text('{"id": 1, "prompt": "a"}\n{"id": 2, "prompt": "b"}\n')
    stderr = io.StringIO()
    out = Output(stdout=io.StringIO(), stderr=stderr)
    code = guarded(out, lambda: run_batch(Call(out, offline=True), str(source), None, answer))
    assert code == ExitCode.RESOURCES and requests == ["a"]
    assert stderr.getvalue().splitlines()[0] == f"error: the GPU failed: CUDA error: {cause}"
    assert len(stderr.getvalue().splitlines()) == 2


def test_logits_that_are_not_numbers_end_their_request_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """F5."""
    run = ModelRunner.run
    passes = []

    def broken(self: ModelRunner, *arguments: Any) -> Any:
        logits = run(self, *arguments)
        passes.append(logits)
        if len(passes) == 2:  # only the first row of a batch
            logits = logits.clone()
            logits[0] = torch.nan
        return logits

    monkeypatch.setattr(ModelRunner, "run", broken)
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"id": {number}, "prompt": "Who are you?"}}\n' for number in (1, 2, 3)))
    with pytest.raises(SystemExit):
        main(["run", "pico", "--batch", str(source), "-n", "4"])
    first, *others = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "not a number" in first["error"]["message"] and first["error"]["exit_code"] == ExitCode.MODEL
    assert len(others) == 2 and all(other["text"] for other in others)
    passes.clear()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(SystemExit) as stop:
        main(["run", "pico", "Who are you?"])
    assert stop.value.code == ExitCode.MODEL and "not a number" in capsys.readouterr().err


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[HubServer]:
    for name in [name for name in environment if name.lower().endswith("_proxy")]:
        del environment[name]
    with hub_server() as running:
        environment |= {"HF_ENDPOINT": running.address(), "HF_HUB_OFFLINE": "0"}
        yield running


def test_of_two_pulls_one_waits_and_uses_what_the_other_brought(
    server: HubServer, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D6."""
    server.add(REPO, FILES)
    take, waited = server.take, threading.Event()

    def held(host: str, path: str) -> Fault:
        assert host == "hub" or waited.wait(60)
        return take(host, path)

    monkeypatch.setattr(server, "take", held)

    def start() -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "mycli.cli", "pull", REPO]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    first = start()
    while first.poll() is None and not server.requests("storage:"):
        time.sleep(0.01)
    second = start()
    assert second.stderr is not None
    lines = iter(second.stderr.readline, "")
    assert any(f"by process {first.pid}: waiting" in line for line in lines)
    waited.set()
    folders = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert folders[0] == folders[1] and Path(folders[0].strip()).is_dir()
    fetched = [request.path for request in server.requests("storage:") if request.method == "GET"]
    assert len(fetched) == len(set(fetched)), "nothing arrived twice"


def test_a_pull_is_of_one_commit_whatever_becomes_of_its_branch(
    server: HubServer, mycli: Mycli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D10."""
    before = server.add(REPO, FILES)
    after: list[str] = []
    take = server.take

    def moving(host: str, path: str) -> Fault:
        if "/resolve/" in path and not after:
            after.append(server.add(REPO, {**FILES, "tokenizer.json": b'{"moved": true}'}))
        return take(host, path)

    monkeypatch.setattr(server, "take", moving)
    pulled = mycli("pull", REPO)
    folder = Path(pulled.stdout.strip())
    assert pulled.returncode == 0 and after and folder.name == before
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    planned = json.loads(mycli("pull", REPO, "--dry-run", "--json").stdout)
    assert planned["new_bytes"] > 0, "the next pull is of the branch as it is now"
    shown = json.loads(mycli("show", REPO, "--offline", "--json").stdout)
    assert (shown["commit"], shown["repo"]) == (before, REPO)


def test_verify_finds_one_bit_anywhere_in_what_was_quantized(mycli: Mycli, tmp_path: Path) -> None:
    """A33."""
    folder = tmp_path / "copy"
    quantized = mycli(
        "quantize", "pico-draft", "--method", "rtn", "--report", "none", "-q", "--group", "64", "-o", str(folder)
    )
    assert quantized.returncode == 0, quantized.stderr
    assert mycli("verify", str(folder)).returncode == 0
    weights = folder / "model.safetensors"
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    places = [(weights, 9), (weights, header), (weights, weights.stat().st_size - 1), (folder / "tokenizer.json", 99)]
    for file, place in places:
        whole = file.read_bytes()
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        verified = mycli("verify", str(folder), "--json")
        states = {file["name"]: file["state"] for file in json.loads(verified.stdout)["files"]}
        assert verified.returncode == ExitCode.GATE, (file.name, place)
        assert {name for name, state in states.items() if state != "ok"} == {file.name}
        assert states[file.name] == "damaged"
        file.write_bytes(whole)
    assert mycli("verify", str(folder)).returncode == 0
