"""Test `mycli bench`: formats, records and the regression gate, on pico with short tests."""

import csv
import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mycli.cli.commands.bench import _all_weight_bytes
from mycli.cli.main import main
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device import placement
from mycli.runtime.device.bandwidth import recorded_bandwidth
from mycli.runtime.device.probe import cpu_name
from mycli.runtime.device.system import Memory
from mycli.runtime.diagnostics import throughput as bench
from mycli.runtime.errors import ExitCode
from mycli.runtime.layers.streamed_experts import ExpertReads
from mycli.runtime.memory.estimate import estimate
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.weights import weight_bytes
from tests.support.busy_device import busy_once
from tests.support.families import CASES, make
from tests.support.packed_mixture import write_mixture

SHORT = ("pico", "-p", "4", "-n", "2", "-r", "2", "--device", "cpu")


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(bench, "measure_bandwidth", lambda device, nbytes: 20.0)


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["bench", *arguments])
    return int(stop.value.code or 0)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SHORT, "-d", "0,8") == ExitCode.OK
    captured = capsys.readouterr()
    lines = [line.split("|") for line in captured.out.splitlines()]
    assert [cells[6].strip(" -") for cells in lines] == ["test", "", "pp4", "tg2", "pp4 @ d8", "tg2 @ d8"]
    assert all(" ± " in cells[7] for cells in lines[2:])
    assert lines[2][8].strip().endswith("ms") and not lines[2][9].strip()  # a prompt has a TTFT, a reply a TPOT
    assert lines[3][9].strip().endswith("ms") and lines[3][10].strip().endswith("%")
    assert "20.0 GB/s" in captured.err


def measured(patch: pytest.MonkeyPatch, experts: ExpertReads | None = None) -> None:
    """Replace the measurement by fixed results: 20 tokens per second, the first after 125 ms."""

    def run_trial(runner: object, trial: bench.Trial, repetitions: int, progress: object) -> bench.Result:
        seconds = (0.02, 0.04) if trial.generate else ()
        return bench.Result(trial, (10.0, 30.0), () if seconds else (0.125,), seconds, 1.5, 64 << 20, experts)

    patch.setattr(bench, "run_trial", run_trial)


def test_numbers_of_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch)
    assert call(*SHORT) == ExitCode.OK
    captured = capsys.readouterr()
    prompt, reply = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in captured.out.splitlines() if "±" in line
    )
    # 20 times the 11.5 MB of pico a second are 1 % of 20 GB.
    assert prompt == ["pico", "11 MiB", "16.00", "cpu", "bf16", "pp4", "20.00 ± 14.14", "125.0 ms", "", "", "64 MiB"]
    assert reply[5:] == ["tg2", "20.00 ± 14.14", "", "20.0/40.0 ms", "1%", "64 MiB"]
    assert "expert hits" not in captured.out


def test_experts_read_from_disk_have_a_column_and_a_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, ExpertReads(requested=8, resident=6, nbytes=64 << 20, seconds=0.03125))
    assert call(*SHORT) == ExitCode.OK
    captured = capsys.readouterr()
    cells = [line.split("|")[-2].strip() for line in captured.out.splitlines()]
    assert cells[0] == "expert hits" and cells[2:] == ["75%", "75%"]
    assert "tg2: 75% of the experts used were in memory, 64 MiB read from disk at 2.1 GB/s\n" in captured.err
    measured(monkeypatch, ExpertReads(requested=8, resident=8))
    assert call(*SHORT) == ExitCode.OK
    assert "tg2: 100% of the experts used were in memory\n" in capsys.readouterr().err


def test_the_longest_test_leaves_the_least_room_for_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_mixture(tmp_path / "mixture")
    opened = open_model_folder(folder)
    plan = MemoryPlan(opened.config, opened.packings, context=4)
    room = estimate(plan).needed - 1
    monkeypatch.setattr(placement, "memory", lambda: Memory(room, room, "machine"))
    measured(monkeypatch)

    def note(lengths: str) -> str:
        assert call(str(folder), "-p", lengths, "-n", "0", "--device", "cpu") == ExitCode.OK
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("experts: ")]
        return line

    short, long = note("3"), note("50")
    assert short != long and note("3,50") == note("50,3") == long


def test_a_pipe_without_a_reader_ends_the_measurement(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []

    def run_trial(runner: object, trial: object, repetitions: int, progress: Callable[[int], None]) -> None:
        for repetition in range(repetitions):
            progress(repetition)
            runs.append(repetition)

    monkeypatch.setattr(bench, "run_trial", run_trial)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert call(*SHORT) == ExitCode.PIPE
        monkeypatch.undo()
    assert runs == [] and "error" not in capsys.readouterr().err


def test_a_ceiling_that_was_beaten_is_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measured memory bandwidth that a reply exceeded is dropped, also from the estimates."""
    monkeypatch.setattr(bench, "measure_bandwidth", lambda device, nbytes: 1e-3)
    monkeypatch.setattr(bench, "MEASURED_BYTES", 1 << 20)  # as if pico exceeded every cache
    assert call(*SHORT, "--json") == ExitCode.OK
    reply = json.loads(capsys.readouterr().out)["results"][1]
    assert reply["bandwidth_share"] == pytest.approx(1)
    with pytest.raises(SystemExit):
        main(["estimate", "pico", "--device", "cpu", "--json"])
    assert json.loads(capsys.readouterr().out)["bandwidth_gb_per_second"] > 1e-3


def test_a_model_in_the_caches_beats_no_ceiling(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that fits the CPU caches reads faster than memory and is not compared with memory bandwidth."""
    monkeypatch.setattr(bench, "measure_bandwidth", lambda device, nbytes: 1e-3)
    assert call(*SHORT, "--json") == ExitCode.OK
    reply = json.loads(capsys.readouterr().out)["results"][1]
    assert reply["bandwidth_gb_per_second"] == 1e-3 and reply["bandwidth_share"] > 1


@pytest.mark.parametrize("busy", ["before-the-tests", "after-them"])
def test_one_busy_measurement_is_not_the_ceiling(
    busy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory bandwidth is measured before and after each test, so that the ceiling reflects the same load."""
    busy_once(monkeypatch, bench, "run_trial", busy == "before-the-tests")
    assert call(*SHORT, "--json") == ExitCode.OK
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["bandwidth_gb_per_second"] for row in rows] == ([36, 36] if busy == "before-the-tests" else [36, 12])
    assert recorded_bandwidth(tmp_path / "state" / "mycli", cpu_name()) == 36


def test_the_size_of_a_mixture_counts_the_experts_on_disk(tmp_path: Path) -> None:
    make(tmp_path, *CASES["qwen3_moe-8top2"])
    opened = open_model_folder(tmp_path)
    plan = MemoryPlan(opened.config, context=64)
    partial = replace(plan, expert_slots=3)
    assert weight_bytes(partial) < weight_bytes(plan) == _all_weight_bytes(weight_bytes(partial), partial)
    assert _all_weight_bytes(1, None) == 1


def test_a_test_may_fill_the_context(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch)
    assert call("pico", "-p", "2047", "-n", "0", "--device", "cpu") == ExitCode.OK
    assert "pp2047" in capsys.readouterr().out


def test_json_has_every_sample(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SHORT, "--json") == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    prompt, reply = found["results"]
    assert found["schema_version"] == 1
    for row in (prompt, reply):
        assert len(row["samples"]) == 2 and sum(row["samples"]) / 2 == pytest.approx(row["tokens_per_second"])
        assert row["size_bytes"] == 2 * 5_770_496 and row["bits_per_weight"] == 16
        assert row["dtype"] == row["kv"] == "bf16" and row["device"] == "cpu" and row["peak_bytes"] > 50 << 20
        assert row["warmup_seconds"] > 0 and row["load_seconds"] > 0
    assert prompt["ttft_p50_seconds"] > 0 and prompt["tpot_p50_seconds"] is None
    assert reply["tpot_p99_seconds"] >= reply["tpot_p50_seconds"] > 0 and reply["bandwidth_share"] > 0


def test_jsonl_and_csv_hold_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SHORT, "-o", "jsonl") == ExitCode.OK
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["test"] for line in lines] == ["pp4", "tg2"]
    assert call(*SHORT, "-o", "csv") == ExitCode.OK
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["test"] for row in rows] == ["pp4", "tg2"]
    assert set(rows[0]) == set(lines[0]) - {"schema_version"}
    assert len(rows[0]["samples"].split()) == 2


def record(path: Path, factor: float, *, test: str = "tg2") -> Path:
    """Write a saved run whose rates are `factor` times what any machine reaches."""
    row = {"model": "pico", "test": test, "device": "cpu", "dtype": "bf16", "kv": "bf16"}
    path.write_text(json.dumps({"schema_version": 1, "results": [{**row, "samples": [factor, factor * 1.01]}]}))
    return path


def test_compare_with_what_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "before.json"
    assert call(*SHORT, "--save", str(saved)) == ExitCode.OK
    assert call(*SHORT, "--compare", str(saved)) == ExitCode.OK
    assert re.search(r"\| *change *\|", capsys.readouterr().out)
    assert call(*SHORT, "--compare", str(saved), "--json") == ExitCode.OK
    for row in json.loads(capsys.readouterr().out)["results"]:
        low, high = row["change_95"]
        assert low <= row["change"] <= high
    assert call(*SHORT, "-r", "1", "--compare", str(saved), "--json") == ExitCode.OK
    answer = capsys.readouterr()
    assert [row["change_95"] for row in json.loads(answer.out)["results"]] == [None, None]
    assert call(*SHORT, "-r", "1", "--compare", str(saved)) == ExitCode.OK
    text = capsys.readouterr()
    assert "unknown" in text.out and "inf" not in text.out and "a change may be chance" in text.err
    assert call(*SHORT, "-r", "1", "--compare", str(saved), "--fail-on-regress", "5%") == ExitCode.USAGE
    assert "needs 2 runs of each test on both sides: -r is 1" in capsys.readouterr().err


@pytest.mark.parametrize("before, code", [(1e9, ExitCode.GATE), (1e-3, ExitCode.OK)], ids=["slower", "faster"])
def test_regression_gate(tmp_path: Path, before: float, code: ExitCode, capsys: pytest.CaptureFixture[str]) -> None:
    path = record(tmp_path / "before.json", before)
    assert call(*SHORT, "--compare", str(path), "--fail-on-regress", "5%") == code
    assert ("slower than before: pico tg2" in capsys.readouterr().err) is (code == ExitCode.GATE)
    assert call(*SHORT, "--compare", str(path), "--fail-on-regress", "5%", "--json") == code
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["results"]) == 2 and answer.get("error", {}).get("exit_code", 0) == code


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["-o", "xml"], ExitCode.USAGE),
        (["-p", "many"], ExitCode.USAGE),
        (["-p", "0", "-n", "0"], ExitCode.USAGE),
        (["-b", "0"], ExitCode.USAGE),
        (["-b", "1,0"], ExitCode.USAGE),
        (["-p", "2048"], ExitCode.USAGE),  # the token after it would be beyond the model's limit
        (["-d", "4k"], ExitCode.USAGE),
        (["-r", "0"], ExitCode.USAGE),
        (["--fail-on-regress", "5%"], ExitCode.USAGE),
        (["--fail-on-regress", "little", "--compare", "x"], ExitCode.USAGE),
        (["--compare", "/nowhere.json"], ExitCode.NOT_FOUND),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.name,
)
def test_what_cannot_be_measured(arguments: list[str], code: ExitCode, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("pico", "--device", "cpu", *arguments) == code
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["{}", "[]", '{"results": [{"test": "tg2"}]}', '{"results": [{"samples": [-1.0]}]}'])
def test_a_file_that_is_no_record_is_refused_before_the_work(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert call("pico", "--compare", str(path)) == ExitCode.MODEL


def test_other_tests_than_the_saved_ones_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*SHORT, "--compare", str(record(tmp_path / "b.json", 1.0, test="tg999"))) == ExitCode.USAGE
    assert "none of these tests" in capsys.readouterr().err
