"""The tests of the GPU benchmark without a GPU: arithmetic, time budget, files, and a tiny run on the CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mycli.runtime.errors import ResourceError
from tests.gpu.bench import __main__ as bench
from tests.gpu.bench import timing
from tests.gpu.bench.report import Budget, Case, NotInstalled, Part, Report, Row, run
from tests.gpu.bench.shapes import INT4, LLAMA_8B, floors, roofline_seconds, token_bytes
from tests.gpu.bench.timing import Context, megahertz


def test_bytes_and_ceilings_of_the_8b_model() -> None:
    """The published figures at 4.3 TB/s are 3.870 GB and 1,111 tokens/s; 1,039 at 2k of context; 286 in bf16."""
    assert token_bytes(LLAMA_8B, INT4) == pytest.approx(3.870e9, rel=5e-4)
    assert 4.3e12 / token_bytes(LLAMA_8B, INT4) == pytest.approx(1111, abs=1)
    assert 4.3e12 / token_bytes(LLAMA_8B, INT4, 2048) == pytest.approx(1039, abs=1)
    assert 4.3e12 / token_bytes(LLAMA_8B, None) == pytest.approx(286, abs=1)
    assert token_bytes(LLAMA_8B, INT4, 2048, 4) - token_bytes(LLAMA_8B, INT4) == 4 * 2048 * 128 * 1024


def test_floors_of_the_products() -> None:
    us = {floor.name: floor.microseconds(4300) for floor in floors(LLAMA_8B, INT4)}
    assert us == pytest.approx({"qkv": 3.0, "o": 2.0, "gate_up": 14.1, "down": 7.0, "head": 63.0}, abs=0.06)


def test_roofline_takes_the_slower_limit() -> None:
    assert roofline_seconds(790e12, 1.0, 4300, 790) == pytest.approx(1.0)
    assert roofline_seconds(1.0, 4300e9, 4300, 790) == pytest.approx(1.0)


class Library:
    """Imitates libnvidia-ml as ctypes shows it: one GPU that reports its clock, or an error code."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.open = code, 0

    def nvmlInit_v2(self) -> int:  # noqa: N802  (reason: NVML's name)
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802  (reason: as above)
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802  (reason: as above)
        handle._obj.value = 7
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, clock: Any) -> int:  # noqa: N802  (reason: as above)
        assert (handle.value, kind) == (7, 1)
        clock._obj.value = 1980
        return self.code


def test_the_clock_is_told_where_the_gpu_says_it() -> None:
    library = Library()
    assert megahertz(library, "GPU-1") == 1980 and megahertz(library, "GPU-2") is None and library.open == 0
    assert megahertz(Library(code=3), "GPU-1") is None


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def case(clock: Clock, name: str, seconds: float) -> Case:
    def measure() -> list[Row]:
        clock.now += seconds
        return [{"case": name, "us": seconds, "samples": [seconds]}]

    return Case(name, seconds, measure)


def test_budget_drops_the_last_and_says_so(tmp_path: Path) -> None:
    clock, report = Clock(), Report({"device": "d"}, tmp_path / "r")
    parts = [
        Part("a", 0, lambda: iter([case(clock, "1", 4), case(clock, "2", 4)])),
        Part("b", 0, lambda: iter([case(clock, "3", 4), case(clock, "4", 2)])),
        Part("c", 5, lambda: iter([case(clock, "5", 0)])),
    ]
    run(report, parts, Budget(10, clock))
    found = json.loads((tmp_path / "r.json").read_text())
    assert [row["case"] for rows in found["parts"].values() for row in rows] == ["1", "2", "4"]
    assert [(note["part"], note["case"], note["kind"]) for note in found["notes"]] == [
        ("b", "3", "dropped"),
        ("c", "all", "dropped"),
    ]


def test_a_failure_is_a_line_and_the_rest_goes_on(tmp_path: Path) -> None:
    clock, report = Clock(), Report({"device": "d"}, tmp_path / "r")

    def fail() -> list[Row]:
        raise RuntimeError("no such | kernel")

    def absent() -> list[Row]:
        raise NotInstalled("marlin")

    def breaks() -> Iterator[Case]:
        yield case(clock, "2", 1)
        raise MemoryError("out")

    run(
        report,
        [Part("a", 0, lambda: iter([Case("1", 0, fail), Case("0", 0, absent)])), Part("b", 0, breaks)],
        Budget(9),
    )
    assert [(note["case"], note["kind"]) for note in report.notes] == [
        ("1", "error"),
        ("0", "not installed"),
        ("all", "error"),
    ]
    assert "no such / kernel" in (tmp_path / "r.md").read_text() and report.rows["b"][0]["case"] == "2"


def test_what_was_measured_survives_a_kill(tmp_path: Path) -> None:
    clock, report = Clock(), Report({"device": "d"}, tmp_path / "r")

    def killed() -> list[Row]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(report, [Part("a", 0, lambda: iter([case(clock, "1", 1), Case("2", 0, killed)]))], Budget(9))
    assert [row["case"] for row in json.loads((tmp_path / "r.json").read_text())["parts"]["a"]] == ["1"]


@pytest.mark.slow
def test_whole_protocol_at_tiny_sizes(tmp_path: Path) -> None:
    """Runs in a separate process, as `make bench-gpu` does; every row has its fields, and nothing failed."""
    command = [sys.executable, "-m", "tests.gpu.bench", "--device", "cpu", "--tiny"]
    environment = {**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, capture_output=True, cwd=Path(__file__).parents[2])
    found = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert found["schema"] == 1 and {"device", "date", "torch", "command"} <= set(found)
    assert {note["kind"] for note in found["notes"]} == {"not installed"}
    assert all(row["relative error"] < 5e-3 for row in found["parts"]["error against fp64"])
    products = found["parts"]["products, int4-g128"]
    assert {row["kernel"] for row in products} >= {"torch bf16"} and all(row["us"] > 0 for row in products)
    assert len(found["parts"]) == 13
    (made,) = found["parts"]["quantization, Llama-3.1-8B"]
    assert made["s for 32 layers"] > made["s a layer"] > 0
    assert [row["process"] for row in found["parts"]["cold start"]] == ["import torch, device ready", "run pico -n 1"]
    assert all(row["tokens/s"] > 0 for row in found["parts"]["transformers, Llama-3.1-8B"])
    assert "% of roofline" in next(tmp_path.glob("*.md")).read_text()


@pytest.mark.parametrize("driver", [[], None], ids=["no-gpus-listed", "no-answer"])
def test_needs_no_nvml(driver: list[object] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVML, which a container with CUDA may lack, only the clock of rows and the driver version are missing."""

    def listed() -> list[object]:
        if driver is None:
            raise ResourceError("the NVIDIA driver does not answer")
        return driver

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(bench, "gpus", listed)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert bench.facts(torch.device("cuda"))["driver"] == "unknown"
    monkeypatch.setattr(timing.ctypes, "CDLL", missing)
    assert Context(torch.device("cuda")).clock() == {}
