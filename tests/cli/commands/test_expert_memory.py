"""Test `--expert-memory`: the limit is reported, replies stay the same, bad values are refused."""

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mycli.runtime.device import probe
from mycli.runtime.device.disk import ASSUMED
from mycli.runtime.device.system import Memory
from mycli.runtime.diagnostics import throughput
from tests.support.command_line import Mycli
from tests.support.packed_mixture import write_mixture

estimate = importlib.import_module("mycli.cli.commands.estimate")  # its function has the same name
GREEDY = ("--temperature", "0", "--device", "cpu", "-n", "12")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_mixture(tmp_path_factory.mktemp("mixtures") / "mixture"))


def test_fewer_experts_in_memory_are_said_and_change_no_reply(mycli: Mycli, mixture: str) -> None:
    whole = mycli("run", mixture, "Once upon", *GREEDY)
    assert whole.returncode == 0 and len(whole.stdout) > 12 and whole.stderr == ""
    for size, held in (("100KiB", "2 of 12"), ("200KiB", "4 of 12")):
        some = mycli("run", mixture, "Once upon", *GREEDY, "--expert-memory", size)
        assert (some.stdout, some.returncode) == (whole.stdout, 0)
        assert some.stderr.startswith(f"experts: {held} per layer in memory") and some.stderr.count("\n") == 1
    plenty = mycli("run", mixture, "Once upon", *GREEDY, "--expert-memory", "1GiB")
    assert (plenty.stdout, plenty.stderr) == (whole.stdout, "")


def test_bench_counts_what_was_held(mycli: Mycli, mixture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "MEASURED_BYTES", 1 << 24)  # reading more takes longer than the test
    sizes = ("-p", "16", "-n", "4", "-r", "1", "--device", "cpu", "-o", "json", "-q")
    prompt, reply = json.loads(mycli("bench", mixture, *sizes, "--expert-memory", "100KiB").stdout)["results"]
    assert 0 < prompt["expert_hit_rate"] < 1 and 0 < reply["expert_hit_rate"] < 1 and reply["expert_gb_per_second"] > 0
    whole, _ = json.loads(mycli("bench", mixture, *sizes).stdout)["results"]
    assert whole["expert_hit_rate"] is None


def test_the_rate_of_the_disk_is_measured_on_the_largest_file(
    mycli: Mycli, mixture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(mixture, tmp_path / "mixture"))
    tensors = load_file(folder / "model.safetensors")
    norm = {name: tensors.pop(name) for name in list(tensors) if name == "model.norm.weight"}
    files = {"model-1.safetensors": norm, "model-2.safetensors": tensors}
    for name, part in files.items():
        save_file(part, folder / name)
    (folder / "model.safetensors").unlink()
    index = {tensor: name for name, part in files.items() for tensor in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    command, found = ("estimate", str(folder), "--expert-memory", "100KiB", "--device", "cpu", "--json"), []
    rates: list[Callable[[Path], float | None]] = [lambda path: path.stat().st_size / 1e9, lambda path: None]
    for rate in rates:
        monkeypatch.setattr(estimate, "read_rate", rate)
        experts = json.loads(mycli(*command).stdout)["experts"]
        found.append((experts["disk_source"], experts["disk_gb_per_second"]))
    size = (folder / "model-2.safetensors").stat().st_size
    assert found == [("measured", size / 1e9), ("assumed", ASSUMED)]


def test_an_estimate_leaves_on_disk_what_does_not_fit_but_a_table_and_a_fit_count_all(
    mycli: Mycli, mixture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(free: int, *flags: str) -> dict[str, Any]:
        monkeypatch.setattr(probe, "memory", lambda: Memory(free, free, "machine"))
        done = mycli("estimate", mixture, "--device", "cpu", "--json", *flags)
        assert done.returncode == 0, done.stderr
        parsed: dict[str, Any] = json.loads(done.stdout)
        return parsed

    monkeypatch.setattr(estimate, "read_rate", lambda path: None)
    whole = answer(1 << 30)
    total = whole["bytes"]["total"]
    assert "experts" not in whole and "experts" not in answer(total)
    streamed = answer(total - 1)
    assert 0 < streamed["experts"]["in_memory"] < streamed["experts"]["of"] == 12
    assert streamed["bytes"]["weights"] < whole["bytes"]["weights"]
    tables = [answer(free, "--table")["table"] for free in (1 << 30, total - 1)]
    assert [[row["total_bytes"] for row in table] for table in tables] == [[total]] * 2
    fitted = answer(total - 1, "--fit", "--tol", "0.1%")
    assert fitted["bytes"]["weights"] == whole["bytes"]["weights"] and fitted["context"] < whole["context"]


@pytest.mark.parametrize("size", ["-1", "x", "3 parsecs"])
def test_sizes_that_are_none_are_refused(mycli: Mycli, mixture: str, size: str) -> None:
    refused = mycli("run", mixture, "Hi", *GREEDY, "--expert-memory", size)
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.startswith(f"error: --expert-memory: {size!r} is not a memory size")


def test_less_than_an_expert_is_refused_with_what_one_takes(mycli: Mycli, mixture: str) -> None:
    refused = mycli("run", mixture, "Hi", *GREEDY, "--expert-memory", "1B")
    assert refused.returncode == 5 and refused.stdout == ""
    assert refused.stderr.startswith("error: 1 byte for experts: one expert of each layer takes 40.5 KiB\n")
    assert "hint: the experts of one token take 122 KiB" in refused.stderr


def test_a_model_without_experts_has_no_bound_on_them(mycli: Mycli) -> None:
    refused = mycli("run", "pico", "Hi", *GREEDY, "--expert-memory", "1MB")
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.startswith("error: an expert memory limit applies only")
