"""Test the values of --device without torch."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mycli.runtime.device import probe
from mycli.runtime.device.bandwidth import record_bandwidth
from mycli.runtime.device.nvml import Gpu
from mycli.runtime.device.probe import Target, cpu_name, find_target
from mycli.runtime.errors import ResourceError, UsageError

TWO = [Gpu(0, "NVIDIA H200", 140, 130, (9, 0), "1"), Gpu(1, "NVIDIA Unknown", 24, 20, (8, 9), "1")]


def find(device: str, notes: Path, gpus: Callable[[], list[Gpu]]) -> Target:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "gpus", gpus)
        return find_target(device, notes)


def broken() -> list[Gpu]:
    raise ResourceError("the NVIDIA driver does not answer: code 999")


@pytest.mark.parametrize(
    "device, place, free, bandwidth",
    [("auto", "cuda:0", 130, 4800), ("cuda", "cuda:0", 130, 4800), ("cuda:1", "cuda:1", 20, None)],
)
def test_gpus(tmp_path: Path, device: str, place: str, free: int, bandwidth: float | None) -> None:
    target = find(device, tmp_path, lambda: TWO)
    assert (target.place, target.free, target.gpu, target.bandwidth) == (place, free, True, bandwidth)


def test_what_was_measured_wins_over_the_data_sheet(tmp_path: Path) -> None:
    record_bandwidth(tmp_path, "NVIDIA H200", 4300)
    target = find("cuda:0", tmp_path, lambda: TWO)
    assert (target.bandwidth, target.bandwidth_source) == (4300, "best measured here")


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_cpu(tmp_path: Path, device: str) -> None:
    target = find(device, tmp_path, list)
    assert (target.place, target.gpu, target.bandwidth, target.notes) == ("cpu", False, None, ())
    assert target.free > 0
    record_bandwidth(tmp_path, cpu_name(), 20)
    assert find(device, tmp_path, list).bandwidth == 20


def test_auto_says_why_it_falls_back_and_cuda_never_does(tmp_path: Path) -> None:
    target = find("auto", tmp_path, broken)
    assert target.place == "cpu" and "does not answer" in target.notes[0]
    for device in ("cuda", "cuda:0"):
        with pytest.raises(ResourceError):
            find(device, tmp_path, broken)
        with pytest.raises(ResourceError, match="0 NVIDIA GPUs"):
            find(device, tmp_path, list)
    with pytest.raises(ResourceError, match="2 NVIDIA GPUs"):
        find("cuda:2", tmp_path, lambda: TWO)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "", "cpu:0"])
def test_other_words_are_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(UsageError):
        find(device, tmp_path, lambda: TWO)
