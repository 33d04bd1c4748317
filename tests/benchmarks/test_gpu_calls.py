"""The tests of the GPU calls without a GPU: order, limits and reports, with some on the emulator."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import call, first_call, second_call
from tests.gpu.bench import latency
from tests.gpu.bench.report import Report
from tests.gpu.bench.shapes import INT4, LLAMA_8B, token_bytes
from tests.gpu.call import Asked, Part
from tests.gpu.conftest import LEFT
from tests.support.forked import ForkedProcess
from tests.support.paths import ROOT

PYTHON = [sys.executable, "-c"]


def asked(tmp_path: Path, parts: list[tuple[str, int, str]], seconds: float = 60) -> tuple[bool, dict[str, object]]:
    """Run parts of (name, limit, program); return whether the call succeeded, and the report."""
    report = Report({}, tmp_path / "report")
    commands = [[*PYTHON, code] for _, _, code in parts]
    given = [Part(name, most, command) for (name, most, _), command in zip(parts, commands, strict=True)]
    good = call.ask(report, zip(given, commands, strict=True), seconds)
    return good, json.loads((tmp_path / "report.json").read_text())


def test_each_part_is_written_as_it_ends_and_none_takes_another_along(tmp_path: Path) -> None:
    look = f"import pathlib; print(pathlib.Path({str(tmp_path / 'report.json')!r}).read_text())"
    good, told = asked(
        tmp_path,
        [
            ("first", 30, 'print(\'row: {"error": 0.001, "ok": true}\')'),
            ("second", 30, look + "; import os; os.abort()"),
            ("third", 30, "print('row: {\"ok\": false}')"),
        ],
    )
    notes = {note["part"]: note["text"] for note in told["notes"]}  # type: ignore[attr-defined]  # a list of notes
    assert not good and list(notes) == ["second", "third"]
    assert '"error": 0.001' in notes["second"], "what the first had found was there when the second ran"
    assert told["parts"]["first"] == [{"error": 0.001, "ok": True}]  # type: ignore[index]  # rows by part
    assert told["parts"]["second"][0]["exit"] == -6  # type: ignore[index]  # as above


def test_a_part_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    code = "import subprocess; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True); child.wait()"
    began = time.monotonic()
    good, told = asked(tmp_path, [("hangs", 3, code), ("after", 30, "print(1)")])
    assert not good and time.monotonic() - began < 40
    assert told["parts"]["after"][0]["exit"] == 0  # type: ignore[index]  # rows by part
    pid = told["parts"]["hangs"][0]["last line"]  # type: ignore[index]  # as above
    status = Path(f"/proc/{pid}/status")
    assert not status.exists() or "zombie" in status.read_text()


def test_parts_that_measure_no_time_run_beside_each_other(tmp_path: Path) -> None:
    code = "from pathlib import Path; Path({own!r}).touch()\nwhile not Path({other!r}).exists(): pass"
    own, other = str(tmp_path / "one"), str(tmp_path / "two")
    given = [
        Part("one", 60, [*PYTHON, code.format(own=own, other=other)], timed=False),
        Part("two", 60, [*PYTHON, code.format(own=other, other=own)], timed=False),
        Part("alone", 60, [*PYTHON, "print(3)"]),
    ]
    report = Report({}, tmp_path / "report")
    assert call.ask(report, [(part, part.run) for part in given], 60)  # type: ignore[misc]  # all are commands
    assert sorted(report.rows) == ["alone", "one", "two"]


def test_what_no_longer_fits_is_dropped(tmp_path: Path) -> None:
    good, told = asked(tmp_path, [("late", 30, "print(1)")], seconds=4)
    assert told["notes"] == [{"part": "late", "case": "", "kind": "dropped", "text": "no time is left"}] and good


def test_the_order_and_the_time(tmp_path: Path) -> None:
    parts = first_call.parts(Asked(), tmp_path)
    assert [part.name for part in parts] == [
        "versions",
        "small products",
        "fused pass",
        "soak",
        "commands",
        "tests, memory of NaN",
        "tests, memory as it comes",
        "benchmark",
    ]
    assert parts[-2].environment == {"MYCLI_TEST_POISON": "0"}
    assert [part.name for part in second_call.parts(Asked(), tmp_path)] == [
        "compute-sanitizer",
        "ncu",
        "pieces of a pass",
        "tiles in a pass",
        "profile",
        "sweep of splits",
    ]
    assert all(part.lacks for given in (first_call, second_call) for part in given.parts(Asked(tmp_path), tmp_path))


TORCH = """class cuda:
    pass
def use_deterministic_algorithms(*_, **__):
    pass
"""
GPU_TESTS = """import torch
left = []
def synchronize():
    if left:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
torch.cuda.is_available = lambda: True
torch.cuda.synchronize = synchronize
def test_wrong():
    assert 1 == 2
def test_leaves_an_error():
    left.append(1)
def test_works():
    pass
"""


@pytest.mark.slow
def test_a_gpu_test_that_fails_says_why_at_once(tmp_path: Path) -> None:
    """The reason stands before the summary; the test that leaves an error fails, and those after it are skipped."""
    path = tmp_path / "test_some.py"
    path.write_text(GPU_TESTS)
    (tmp_path / "torch.py").write_text(TORCH)  # a worker has no need of the whole, which takes most of the time
    workers = ["-n", "1"] if find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "tests.gpu.conftest", *workers, "-c", os.devnull]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment.get("PYTHONPATH", "")))
    command += ["--rootdir", str(tmp_path), str(path)]
    pytest_process = ForkedProcess(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    at_once, _, summary = pytest_process.communicate()[0].partition("= ERRORS =")
    assert "call of test_some.py::test_wrong failed:\nE       assert 1 == 2" in at_once
    assert "teardown of test_some.py::test_leaves_an_error failed:\n" in at_once
    assert "illegal memory access" in at_once and "test_works" not in at_once
    assert f": {LEFT}\n1 failed, 1 passed, 1 skipped, 1 error" in summary


def rehearsed(module: str, folder: Path, out: Path, *only: str) -> dict[str, Any]:
    """Run a rehearsal, check that it succeeded, and return its report."""
    command = [sys.executable, "-m", f"tests.gpu.{module}", "--rehearse", str(folder), "--out", str(out)]
    done = subprocess.run(
        [*command, *(word for name in only for word in ("--only", name))], cwd=ROOT, capture_output=True, text=True
    )
    written = next(out.glob("*-call-rehearsal.json"), None)
    assert done.returncode == 0 and written, done.stdout + done.stderr + (written.read_text() if written else "")
    told: dict[str, Any] = json.loads(written.read_text())
    assert {note["kind"] for note in told["notes"]} == {"not rehearsed"}, "what it does not show is said"
    return told


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    """The cache folder kept between test runs: an unchanged kernel is not compiled again."""
    pytest.importorskip("triton")
    return request.config.cache.mkdir("ptx_emulator")  # type: ignore[union-attr]  # the plugin is always loaded


@pytest.mark.slow
def test_a_part_of_the_first_call_rehearsed(folder: Path, tmp_path: Path) -> None:
    told = rehearsed("first_call", folder, tmp_path, "small products")
    (row,) = told["parts"]["small products"]
    assert row["ok"] and row["12 rows"] < 5e-3 and list(told["parts"]) == ["small products"]


@pytest.mark.slow
def test_all_of_the_first_call_rehearsed(folder: Path, tmp_path: Path) -> None:
    told = rehearsed("first_call", folder, tmp_path)
    assert list(told["parts"]) == [part.name for part in first_call.parts(Asked(folder), tmp_path)]
    assert [row["overlap"] for row in told["parts"]["soak"]] == [True, False]


@pytest.mark.slow
def test_all_of_the_second_call_rehearsed(folder: Path, tmp_path: Path) -> None:
    told = rehearsed("second_call", folder, tmp_path)
    assert list(told["parts"]) == [part.name for part in second_call.parts(Asked(folder), tmp_path)]
    (one, other) = told["parts"]["pieces of a pass"]
    assert set(one) == {"rows", "keys", "us per layer", "qkv", "attention", "o", "gate_up", "down"} == set(other)
    assert [row["chosen"] for row in told["parts"]["tiles in a pass"]].count(True) == 1
    swept = told["parts"]["sweep of splits"]
    assert swept[0]["chosen"] and {row["block"] for row in swept} == {64, 128}


def test_an_unknown_part_is_refused_by_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.second_call", "--out", str(tmp_path), "--only", "sweep"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "sweep of splits" in done.stderr


SANITIZER = """========= COMPUTE-SANITIZER
row: {"ok": true}
========= {name} SUMMARY: {count}
"""


@pytest.mark.parametrize(
    ("said", "count"),
    [
        (SANITIZER.replace("{name}", "ERROR").replace("{count}", "0 errors"), 0),
        (SANITIZER.replace("{name}", "ERROR").replace("{count}", "12 errors"), 12),
        (SANITIZER.replace("{name}", "RACECHECK").replace("{count}", "1 hazard displayed (1 error, 0 warnings)"), 1),
        ("========= Error: target application returned an error", None),
    ],
    ids=["none", "errors", "hazard", "nothing was looked for"],
)
def test_what_the_sanitizer_counted(said: str, count: int | None) -> None:
    assert second_call.summary(said) == count


def test_a_sanitizer_that_finds_something_is_a_row_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stub sanitizer that runs nothing returns the result of each check; another one is not installed."""
    stub = tmp_path / "compute-sanitizer"
    stub.write_text(
        '#!/bin/sh\n[ "$2" = memcheck ] && echo "== ERROR SUMMARY: 0 errors" || echo "ERROR SUMMARY: 3 errors"\n'
    )
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    rows = list(second_call.sanitized(Asked()))
    assert [row["ok"] for row in rows] == [True, False, False, False] and rows[1]["errors"] == 3
    assert "3 errors" in capsys.readouterr().out


NCU = """==PROF== Connected to process 1
row: {"rows": 1, "ok": true}
"ID","Kernel Name","Grid Size","gpu__time_duration.sum","launch__registers_per_thread"
"","","","us","register/thread"
"0","multiply_kernel","(32, 16, 1)","9.12","96"
"1","multiply_kernel","(224, 2, 1)","20.48","94"
"""


def test_what_ncu_counted() -> None:
    assert second_call.parse_ncu(NCU) == [
        {"kernel": "multiply_kernel", "grid": "(32, 16, 1)", "time": "9.12 us", "registers": "96 register/thread"},
        {"kernel": "multiply_kernel", "grid": "(224, 2, 1)", "time": "20.48 us", "registers": "94 register/thread"},
    ]
    assert second_call.parse_ncu("==ERROR== ERR_NVGPUCTRPERM") == []


def test_the_predicted_page_is_what_the_model_says() -> None:
    assert (ROOT / "docs" / "results" / "predicted.md").read_text("utf-8") == latency.page()


def test_a_prediction_is_no_less_than_what_memory_allows_and_falls_with_what_is_known_to_cost() -> None:
    for card in latency.cards().values():
        rates = [1e6 / latency.token_microseconds(card, LLAMA_8B, 1, depth) for depth in (0, 2048, 8192)]
        assert rates == sorted(rates, reverse=True)
        assert rates[0] < card.read * 1e9 / token_bytes(LLAMA_8B, INT4)
        *layer, head = latency.launches(card, LLAMA_8B, 1, 2048)
        assert [one.name for one in layer] == ["qkv", "attention", "o", "gate_up", "down"] and head.parts == 1


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_the_model_reads_parts_as_the_kernel_does(rows: int) -> None:
    """The kernel's `add_parts` uses 16 loads of up to two numbers per thread, 8 of four, else 4."""
    assert latency.loads_under_way(rows, 128) == {1: 16, 2: 16, 4: 8, 8: 4, 16: 4}[rows]
