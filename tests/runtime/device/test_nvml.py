"""Test GPU detection against a fake NVML driver."""

import ctypes
from typing import Any

import pytest

from mycli.runtime.device import nvml
from mycli.runtime.device.system import Memory
from mycli.runtime.errors import ResourceError

GIB = 1 << 30


class FakeNvml:
    def __init__(self, names: list[str], failing: dict[str, int] | None = None) -> None:
        self.names = names
        self.failing = failing or {}
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        if code := self.failing.get(name):
            return lambda *arguments: code
        return getattr(self, "_" + name)

    def _nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def _nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.names)
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0

    def _nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 1
        return 0 if uuid == b"MIG-1" else 6

    def _nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: int) -> int:
        buffer.value = f"GPU-{'abc'[handle.value - 1]}-0000".encode()
        return 0

    def _nvmlDeviceGetName(self, handle: Any, buffer: Any, size: int) -> int:
        buffer.value = self.names[handle.value - 1].encode()
        return 0

    def _nvmlSystemGetDriverVersion(self, buffer: Any, size: int) -> int:
        buffer.value = b"580.1"
        return 0

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.free = 24 * GIB, handle.value * GIB
        return 0

    def _nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 8, 9
        return 0


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def found(monkeypatch: pytest.MonkeyPatch, library: FakeNvml) -> list[nvml.Gpu]:
    monkeypatch.setattr(nvml, "_load_nvml", lambda: library)
    return nvml.gpus()


THREE = ["NVIDIA GeForce RTX 4090", "NVIDIA H200", "NVIDIA Unknown"]


@pytest.mark.parametrize(
    "setting, free",
    [
        (None, [1, 2, 3]),
        ("", []),
        ("2,0", [3, 1]),
        ("1, 7, 0", [2]),
        ("-1", []),
        ("GPU-b", [2]),
        ("GPU-", []),
        ("GPU-c,GPU-a", [3, 1]),
        ("MIG-1", [1]),
        ("MIG-2,0", []),
    ],
    ids=str,
)
def test_cuda_visible_devices(setting: str | None, free: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml(THREE)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    gpus = found(monkeypatch, library)
    assert [gpu.free // GIB for gpu in gpus] == free
    assert [gpu.index for gpu in gpus] == list(range(len(free)))
    assert library.open == 0


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    (gpu,) = found(monkeypatch, FakeNvml(THREE[:1]))
    assert gpu == nvml.Gpu(0, "NVIDIA GeForce RTX 4090", 24 * GIB, GIB, (8, 9), "580.1")


def test_a_gpu_without_memory_of_its_own_has_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "memory", lambda: Memory(128 * GIB, 100 * GIB, "machine"))
    (gpu,) = found(monkeypatch, FakeNvml(["NVIDIA GB10"], {"nvmlDeviceGetMemoryInfo": 3}))
    assert (gpu.name, gpu.total, gpu.free) == ("NVIDIA GB10", 128 * GIB, 100 * GIB)


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    assert found(monkeypatch, FakeNvml([], {"nvmlInit_v2": 9})) == []
    monkeypatch.setattr(nvml, "_load_nvml", missing)
    assert nvml.gpus() == []


@pytest.mark.parametrize("call", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetMemoryInfo"])
def test_a_driver_that_fails_is_an_error(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml(THREE, {call: 999})
    with pytest.raises(ResourceError, match=f"{call} failed with NVML code 999"):
        found(monkeypatch, library)
    assert library.open == 0


def test_the_ctypes_structure_is_nvmls() -> None:
    assert ctypes.sizeof(nvml._NvmlMemory) == 24
