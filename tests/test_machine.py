"""What the machine is said to have, against made-up /proc, /sys and a made-up driver."""

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime import machine
from mycli.runtime.errors import ResourceError

MEMINFO = "MemTotal:       16777216 kB\nMemFree:  100 kB\nMemAvailable:   12582912 kB\nHugePages_Total:       0\n"
GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(folder: str, limit: str, usage: int, inactive: int) -> dict[str, str]:
    base = f"sys/fs/cgroup/{folder}"
    return {
        f"{base}memory.max": limit,
        f"{base}memory.current": str(usage),
        f"{base}memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def test_memory_of_a_bare_machine(tmp_path: Path) -> None:
    found = machine.memory(tree(tmp_path, {"proc/meminfo": MEMINFO}))
    assert found == machine.Memory(16 * GIB, 12 * GIB, "machine")


def test_a_container_limit_counts_and_its_page_cache_is_free(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", **v2("", str(4 * GIB), 3 * GIB, 2 * GIB)}
    found = machine.memory(tree(tmp_path, files))
    assert (found.total, found.available) == (4 * GIB, 3 * GIB)
    assert found.limit.endswith("sys/fs/cgroup")


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n"}
    files |= v2("a/b/", "max", 0, 0) | v2("a/", str(2 * GIB), GIB, 0) | v2("", str(8 * GIB), 2 * GIB, 0)
    assert machine.memory(tree(tmp_path, files)).available == GIB


def test_a_group_whose_path_is_the_hosts(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/docker/0123\n", **v2("", str(GIB), 0, 0)}
    assert machine.memory(tree(tmp_path, files)).total == GIB


def test_cgroup_version_1(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n0::/\n"}
    files |= {
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/x/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
    }
    assert machine.memory(tree(tmp_path, files)).available == GIB + GIB // 2


def test_a_full_group_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", **v2("", str(GIB), 2 * GIB, 0)}
    assert machine.memory(tree(tmp_path, files)).available == 0


def test_without_proc_the_physical_memory_is_all_there_is_to_say(tmp_path: Path) -> None:
    found = machine.memory(tmp_path)
    assert found.total == found.available > 0


def test_memory_of_this_machine_is_plausible() -> None:
    found = machine.memory()
    assert 0 < found.available <= found.total


@pytest.mark.parametrize(
    "text, model, flag",
    [
        ("processor : 0\nmodel name\t: Fast: 9000\nflags\t\t: fpu avx2\n\nflags : other\n", "Fast: 9000", "avx2"),
        ("processor : 0\nFeatures\t: fp asimd\n", "", "asimd"),
        ("", "", ""),
    ],
    ids=["x86", "arm", "none"],
)
def test_cpu(tmp_path: Path, text: str, model: str, flag: str) -> None:
    found = machine.cpu(tree(tmp_path, {"proc/cpuinfo": text}))
    assert found.model == model and (not flag or flag in found.flags) and "other" not in found.flags
    assert found.cores >= 1


class FakeNvml:
    """libnvidia-ml as ctypes shows it: functions that fill what they are handed and return a code."""

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
def test_cuda_visible_devices(setting: str | None, free: list[int]) -> None:
    library = FakeNvml(THREE)
    found = machine.gpus({} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}, lambda: library)
    assert [gpu.free // GIB for gpu in found] == free
    assert [gpu.index for gpu in found] == list(range(len(free)))
    assert library.open == 0


def test_a_gpu_is_described() -> None:
    (gpu,) = machine.gpus({}, lambda: FakeNvml(THREE[:1]))
    assert gpu == machine.Gpu(0, "NVIDIA GeForce RTX 4090", 24 * GIB, GIB, (8, 9), "580.1")


def test_no_driver_is_no_gpu() -> None:
    def missing() -> Any:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    assert machine.gpus({}, missing) == []
    assert machine.gpus({}, lambda: FakeNvml([], {"nvmlInit_v2": 9})) == []


@pytest.mark.parametrize("call", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetMemoryInfo"])
def test_a_driver_that_fails_is_an_error(call: str) -> None:
    library = FakeNvml(THREE, {call: 999})
    with pytest.raises(ResourceError, match=f"{call} failed with NVML code 999"):
        machine.gpus({}, lambda: library)
    assert library.open == 0


def test_the_ctypes_structure_is_nvmls() -> None:
    assert ctypes.sizeof(machine._NvmlMemory) == 24


@pytest.mark.parametrize(
    "name, expected",
    [
        ("NVIDIA H200", 4800),
        ("NVIDIA GeForce RTX 4090", 1008),
        ("Tesla T4", 320),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A1000", None),
    ],
)
def test_bandwidth_by_exact_name(name: str, expected: float | None) -> None:
    assert machine.bandwidth(name) == expected


def test_machine_does_not_import_torch() -> None:
    code = "import sys, mycli.runtime.machine as m; m.memory(), m.cpu(), m.gpus(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
