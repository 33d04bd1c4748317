"""Test `doctor --save` and `--compare`: changes after an update are reported once, without being requested."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.diagnostics import golden_record, selftest, throughput
from mycli.runtime.quantization.scheme import Packing
from tests.support.command_line import Mycli

CPU = ("--device", "cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    small = {"SECONDS": 0.01, "SAMPLE_SECONDS": 0.005, "TIMED_TOKENS": 16, "REPLY_TOKENS": 6, "FEWEST_SAMPLES": 2}
    for name, value in small.items():
        monkeypatch.setattr(golden_record, name, value)
    monkeypatch.setattr(golden_record, "BUSY", 1e9)  # the tests next to this one are other programs
    monkeypatch.setattr(selftest, "PACKINGS", (Packing(4, 128),))
    monkeypatch.setattr(throughput, "measure_bandwidth", lambda device, nbytes: 20.0)
    yield


def stored(environment: dict[str, str]) -> Path:
    return Path(environment["XDG_STATE_HOME"]) / "mycli" / "golden" / "pico-cpu.json"


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_nothing_to_compare_with_is_said(mycli: Mycli) -> None:
    done = mycli("doctor", "pico", "--compare", *CPU)
    assert done.returncode == 2 and "mycli doctor pico --save" in done.stderr
    assert mycli("doctor", "pico", "--compare", "--save", *CPU).returncode == 2


def test_a_folder_that_cannot_be_written_is_refused_before_measuring(mycli: Mycli, environment: dict[str, str]) -> None:
    state = Path(environment["XDG_STATE_HOME"]) / "mycli"
    state.mkdir(parents=True)
    (state / "golden").write_text("")
    done = mycli("doctor", "pico", "--save", *CPU)
    assert done.returncode == 2 and f"cannot write {state / 'golden'}" in done.stderr
    assert "measuring" not in done.stderr
    # No option names the file, so the remedy is the variable.
    assert f"make {state / 'golden'} writable, or set XDG_STATE_HOME to another folder" in done.stderr


def test_same_slower_and_other_replies(mycli: Mycli, environment: dict[str, str]) -> None:
    saved = mycli("doctor", "pico", "--save", *CPU)
    assert saved.returncode == 0 and "4 replies, " in saved.stdout and "tok/s, " in saved.stdout
    path = stored(environment)
    record = json.loads(path.read_text())
    slow = {name: [rate / 1000 for rate in rates] for name, rates in record["rates"].items()}
    fast = {name: [rate * 1000 for rate in rates] for name, rates in record["rates"].items()}
    change(path, rates=slow, reference=[])  # the machine's own speed changes with the tests next to this one
    done = mycli("doctor", "pico", "--compare", *CPU)
    assert done.returncode == 0 and "the same tokens and bits" in done.stdout and "faster (+" in done.stdout
    change(path, rates=fast)
    done = mycli("doctor", "pico", "--compare", "--json", *CPU)
    answer = json.loads(done.stdout)
    assert done.returncode == 6 and answer["golden"]["speed"]["reply"]["verdict"] == "slower"
    assert answer["golden"]["same_bits"] and ": slower (-" in answer["error"]["message"]
    assert "mycli doctor pico --save" in answer["error"]["hint"]
    replies = [list(reply) for reply in record["tokens"]]
    replies[1][2] += 1
    change(path, rates=slow, tokens=replies)
    done = mycli("doctor", "pico", "--compare", *CPU)
    assert done.returncode == 6 and "reply 2 of 4 differs from token 3 on" in done.stderr
    change(path, files="0" * 64)
    done = mycli("doctor", "pico", "--compare", *CPU)
    assert done.returncode == 2 and "its files are not those" in done.stderr


def test_the_first_run_of_a_new_version_says_it_once(mycli: Mycli, environment: dict[str, str]) -> None:
    assert mycli("doctor", "pico", "--save", *CPU).returncode == 0
    run = ("run", "pico", "Hi", "-n", "2", "-t", "0", *CPU)
    assert "doctor" not in mycli(*run).stderr
    path = stored(environment)
    versions = json.loads(path.read_text())["versions"]
    change(path, versions={**versions, "mycli-llm": "0.0.1"})
    first, second = mycli(*run), mycli(*run)
    assert "saved with mycli-llm 0.0.1" in first.stderr and "mycli doctor pico --compare" in first.stderr
    assert "doctor" not in second.stderr and first.stdout == second.stdout
    checked = mycli("doctor", *CPU)
    assert "pico compared with what was saved" in checked.stdout and "mycli-llm 0.0.1" in checked.stdout
    assert "compared with what was saved" not in mycli("doctor", *CPU).stdout
