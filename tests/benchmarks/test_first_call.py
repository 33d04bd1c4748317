"""The first call to a GPU, without one: its order, its limits, its report; and slowly, all of it on the emulator."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import first_call
from tests.gpu.bench.report import Report
from tests.support.paths import ROOT

PYTHON = [sys.executable, "-c"]


def asked(tmp_path: Path, parts: list[tuple[str, int, str]], seconds: float = 60) -> tuple[bool, dict[str, object]]:
    """Whether it went well, and what was written, after parts of (name, limit, program)."""
    report = Report({}, tmp_path / "report")
    good = first_call.ask(report, iter([(name, most, [*PYTHON, code], {}) for name, most, code in parts]), seconds)
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


def test_what_no_longer_fits_is_dropped(tmp_path: Path) -> None:
    good, told = asked(tmp_path, [("late", 30, "print(1)")], seconds=4)
    assert told["notes"] == [{"part": "late", "case": "", "kind": "dropped", "text": "no time is left"}] and good


def test_the_order_and_the_time(tmp_path: Path) -> None:
    parts = list(first_call.commands(first_call.Asked(), tmp_path))
    assert [name for name, *_ in parts] == [
        "versions",
        "small products",
        "fused pass",
        "soak",
        "tests, memory of NaN",
        "tests, memory as it comes",
        "benchmark",
    ]
    assert parts[-2][3] == {"MYCLI_TEST_POISON": "0"}


@pytest.mark.slow
def test_all_of_it_rehearsed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("triton")
    folder = request.config.cache.mkdir("ptx_emulator")  # type: ignore[union-attr]  # the plugin is always there
    command = [sys.executable, "-m", "tests.gpu.first_call", "--rehearse", str(folder)]
    command += ["--out", str(tmp_path), "--minutes", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + (tmp_path / "first-call-rehearsal.md").read_text()
    told = json.loads((tmp_path / "first-call-rehearsal.json").read_text())
    assert told["notes"] == [] and all(row["ok"] for row in told["parts"]["soak"])
