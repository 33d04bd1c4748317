"""Test `mycli doctor` on a healthy and on a faulty machine."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mycli.cli.commands.doctor import _bandwidth_text, _path, _portable, _portable_text
from mycli.cli.main import main
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.bandwidth import recorded_bandwidth
from mycli.runtime.device.nvml import Gpu
from mycli.runtime.device.probe import cpu_name
from mycli.runtime.device.system import Memory, cpu
from mycli.runtime.diagnostics import selftest as doctor
from mycli.runtime.diagnostics import throughput as bench
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.errors import Declined, ExitCode, ResourceError
from mycli.runtime.kernels.cpu.library import build as cpu_build
from mycli.runtime.kernels.cpu.library import isa
from mycli.runtime.quantization.scheme import Packing
from tests.support.busy_device import busy_once
from tests.support.embedding_models import cross_encoder, qwen3_embedding
from tests.support.models import CPU
from tests.support.paths import PICO


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(bench, "measure_bandwidth", lambda device, nbytes: 20.0)
    monkeypatch.setattr(doctor, "PACKINGS", (Packing(4, 128),))
    return tmp_path / "state" / "mycli"


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--device", "cpu", *arguments])
    return int(stop.value.code or 0)


def test_healthy(capsys: pytest.CaptureFixture[str], state_dir: Path) -> None:
    assert call() == ExitCode.OK
    text = capsys.readouterr().out
    assert "CPU kernel" in text and ("native" in text or "not available" in text)
    for part in ("torch 2.", "GiB free of", "20.0 GB/s", doctor.ANSWER, "int4-g128", "used", "relative error"):
        assert part in text, part
    assert recorded_bandwidth(state_dir, cpu_name()) == 20


def test_limits_of_the_process_and_features_of_the_cpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("mycli.cli.commands.doctor")  # its function has the same name
    processor = replace(cpu(), cores=3, quota=1.5, flags=frozenset({"sse", "avx2", "amx_int8"}))
    monkeypatch.setattr(module, "cpu", lambda: processor)
    monkeypatch.setattr(module, "gpus", list)
    rows = []
    for limit in ("the control group", "machine"):
        monkeypatch.setattr(module, "memory", lambda limit=limit: Memory(2 << 30, 1 << 30, limit))
        rows.append(dict(module._facts()))
    assert rows[0]["CPU"].endswith("3 cores (a limit of 1.5 CPUs of time), avx2 amx_int8")
    assert rows[0]["memory"].endswith("GiB (limit of the control group)") and "limit" not in rows[1]["memory"]


def test_kernels_that_decline_are_listed_with_v(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == ExitCode.OK
    short = capsys.readouterr()
    assert call("-v", "--warm") == ExitCode.OK
    long = capsys.readouterr()
    assert "| declined" not in short.out and "| declined" in long.out
    hidden = long.out.count("| declined")
    assert f"({hidden} kernels that decline a packing are listed with -v)" in short.err
    assert "listed with -v" not in long.err
    assert "nothing to compile on this device" in long.out and "warm-up" not in short.out


@pytest.mark.parametrize(
    ("best", "sheet", "text"),
    [
        (20.0, None, "20.0 GB/s now"),
        (25.0, 40.0, "20.0 GB/s now, 50% of the data sheet's 40; 25.0 at best, which estimate uses"),
    ],
)
def test_a_better_bandwidth_of_earlier_is_named(best: float, sheet: float | None, text: str) -> None:
    assert _bandwidth_text(20.0, best, sheet) == text


def test_a_busy_machine_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([100.0, 200.0])
    monkeypatch.setattr("mycli.cli.text.progress.cpu_wait_seconds", lambda: next(seconds))
    monkeypatch.setattr("mycli.cli.text.progress.BUSY_SECONDS", 0.0)
    assert call() == ExitCode.OK
    assert "busy machine: other programs used" in capsys.readouterr().err


@pytest.mark.parametrize("busy", ["before-the-checks", "after-them"])
def test_one_busy_measurement_is_not_the_bandwidth(
    busy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy_once(monkeypatch, doctor, "check_kernels", busy == "before-the-checks")
    assert call("--json") == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["bandwidth_gb_per_second"] == 36


def test_says_why_replies_are_slow_without_a_compiler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_build, "native", lambda: Declined("no-compiler"))
    assert call() == ExitCode.OK
    text = " ".join(capsys.readouterr().out.split())
    assert "not available: no GNU C++ compiler found (install g++, or set CXX); torch's 4-bit operator" in text


@pytest.mark.parametrize(
    ("best", "requested", "text"),
    [
        ("avx2", "", "the best for this machine"),
        ("avx512", "", "avx512 is not supported by the compiler or the system"),
        ("avx2", "avx2", "set by MYCLI_CPU_ISA"),
        ("avx512", "avx2", "set by MYCLI_CPU_ISA; this machine supports avx512"),
    ],
)
def test_the_instruction_set_is_explained(
    best: str, requested: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_build, "native", lambda: SimpleNamespace(isa="avx2", compiled=None))
    monkeypatch.setattr(isa, "best_set", lambda flags: best)
    monkeypatch.setattr(isa, "requested_set", lambda flags: requested)
    assert _path(CPU) == [("CPU kernel", f"native, avx2: {text}; prebuilt")]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json") == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found["reply"] == doctor.ANSWER and found["bandwidth_gb_per_second"] == 20
    assert not {"golden", "warm_passes"} & found.keys()
    assert sum(kernel["used"] for kernel in found["kernels"]) >= 1 and all(kernel["ok"] for kernel in found["kernels"])


def test_a_wrong_reply_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "golden_reply", lambda *_: "The capital of Japan is Paris.")
    assert call() == ExitCode.GATE
    assert "instead of" in capsys.readouterr().err
    assert call("--json") == ExitCode.GATE
    answer = json.loads(capsys.readouterr().out)
    assert "Paris" in answer["reply"] and "instead of" in answer["error"]["message"]


def test_a_wrong_kernel_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PRODUCT_TOLERANCE", 0.0)
    assert call() == ExitCode.GATE
    captured = capsys.readouterr()
    assert "WRONG" in captured.out and "is wrong on int4-g128" in captured.err


def test_a_broken_driver_is_reported_not_fatal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mycli.cli.commands import doctor as command

    def broken() -> list[Gpu]:
        raise ResourceError("the NVIDIA driver does not answer: code 999")

    monkeypatch.setattr(command, "gpus", broken)
    assert call() == ExitCode.OK
    assert "does not answer" in capsys.readouterr().out
    monkeypatch.setattr(command, "gpus", lambda: [Gpu(0, "NVIDIA H200", 140 << 30, 130 << 30, (9, 0), "580.1")])
    assert call() == ExitCode.OK
    assert "NVIDIA H200, compute 9.0, 130.00 GiB free of 140.00 GiB, driver 580.1" in capsys.readouterr().out


def test_models_of_vectors_and_of_scores_have_no_portable_bits(tmp_path: Path) -> None:
    folders = (PICO, qwen3_embedding(tmp_path / "embedding"), cross_encoder(tmp_path / "reranker"))
    reasons = [_portable(LoadedModel.load(open_model_folder(folder), CPU))["declined"] for folder in folders]
    assert ["computes embeddings" in str(declined) for declined in reasons] == [False, True, True]


def test_products_whose_bits_differ_between_cpus_are_counted() -> None:
    texts = [
        _portable_text({"declined": declined, "differing": differing})
        for declined, differing in (("a reason", ["q_proj"]), (None, []), (None, ["q_proj", "o_proj"]))
    ]
    assert texts[0] == "not available: a reason"
    assert "also without it" in texts[1] and texts[2].endswith("without it 2 products differ, such as q_proj")
