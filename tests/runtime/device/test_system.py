"""Test system information against a fake /proc and /sys."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mycli.runtime.device import system as machine

MEMINFO = "MemTotal:       16777216 kB\nMemFree:  100 kB\nMemAvailable:   12582912 kB\nHugePages_Total:       0\n"
GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path / "sys/fs/cgroup")
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def v2(folder: str, limit: str, usage: int, inactive: int) -> dict[str, str]:
    base = f"sys/fs/cgroup/{folder}"
    return {
        f"{base}memory.max": limit,
        f"{base}memory.current": str(usage),
        f"{base}memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def test_memory_of_a_bare_machine(root: Path) -> None:
    write(root, {"proc/meminfo": MEMINFO})
    found = machine.memory()
    assert found == machine.Memory(16 * GIB, 12 * GIB, "machine")


def test_a_container_limit_counts_and_its_page_cache_is_free(root: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", **v2("", str(4 * GIB), 3 * GIB, 2 * GIB)}
    write(root, files)
    found = machine.memory()
    assert (found.total, found.available) == (4 * GIB, 3 * GIB)
    assert found.limit.endswith("sys/fs/cgroup")


def test_a_limit_is_all_that_a_group_can_have(root: Path) -> None:
    """The page cache of a group may hold more than its use at the moment; without a share of it all is free."""
    write(root, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", **v2("", str(4 * GIB), GIB, 3 * GIB)})
    assert machine.memory().available == 4 * GIB


def test_the_tightest_of_nested_groups_counts(root: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n"}
    files |= v2("a/b/", "max", 0, 0) | v2("a/", str(2 * GIB), GIB, 0) | v2("", str(8 * GIB), 2 * GIB, 0)
    write(root, files)
    assert machine.memory().available == GIB


def test_a_group_whose_path_is_the_hosts(root: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/docker/0123\n", **v2("", str(GIB), 0, 0)}
    write(root, files)
    assert machine.memory().total == GIB


def test_cgroup_version_1(root: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n0::/\n"}
    files |= {
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/x/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
    }
    write(root, files)
    assert machine.memory().available == GIB + GIB // 2


@pytest.mark.parametrize("version", [1, 2])
def test_active_pages_of_files_are_free_too(root: Path, version: int) -> None:
    """The pages of a model file that was read twice are active: without them, its second start would be refused."""
    if version == 2:
        files = {"proc/self/cgroup": "0::/\n", **v2("", str(4 * GIB), 3 * GIB, GIB)}
        files["sys/fs/cgroup/memory.stat"] += f"active_file {GIB}\n"
    else:
        files = {"proc/self/cgroup": "4:memory:/\n"}
        files["sys/fs/cgroup/memory/memory.limit_in_bytes"] = str(4 * GIB)
        files["sys/fs/cgroup/memory/memory.usage_in_bytes"] = str(3 * GIB)
        files["sys/fs/cgroup/memory/memory.stat"] = f"total_inactive_file {GIB}\ntotal_active_file {GIB}\n"
    write(root, {"proc/meminfo": MEMINFO, **files})
    assert machine.memory().available == 3 * GIB


def cpu_v2(text: str) -> dict[str, str]:
    return {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": text}


def cpu_v1(quota: int, period: int) -> dict[str, str]:
    base = "sys/fs/cgroup/cpu/docker/7"
    files = {f"{base}/cpu.cfs_quota_us": f"{quota}\n", f"{base}/cpu.cfs_period_us": f"{period}\n"}
    return {"proc/self/cgroup": "5:cpu,cpuacct:/docker/7\n4:memory:/docker/7\n0::/\n", **files}


@pytest.mark.parametrize(
    "files, quota, cores",
    [
        ({}, None, 8),
        (cpu_v2("max 100000\n"), None, 8),
        (cpu_v2("100000 100000\n"), 1.0, 1),
        (cpu_v2("150000 100000\n"), 1.5, 2),
        (cpu_v2("10000 100000\n"), 0.1, 1),
        (cpu_v2("6400000 100000\n"), None, 8),
        (cpu_v1(-1, 100000), None, 8),
        (cpu_v1(250000, 100000), 2.5, 3),
        (cpu_v1(0, 0), None, 8),
    ],
    ids=["none", "v2-max", "v2-1", "v2-1.5", "v2-0.1", "v2-64", "v1-max", "v1-2.5", "v1-invalid"],
)
def test_a_quota_of_cpu_time_limits_the_cores(
    root: Path, files: dict[str, str], quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: set(range(8)))
    write(root, files)
    found = machine.cpu()
    assert (found.quota, found.cores) == (quota, cores)


def test_the_smallest_quota_of_nested_groups_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: set(range(8)))
    files = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "200000 100000\n"}
    write(root, {**files, "sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"})
    assert machine.cpu_quota() == 2.0


def test_a_full_group_leaves_nothing(root: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", **v2("", str(GIB), 2 * GIB, 0)}
    write(root, files)
    assert machine.memory().available == 0


def test_without_proc_the_physical_memory_is_all_there_is_to_say(root: Path) -> None:
    found = machine.memory()
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
def test_cpu(root: Path, text: str, model: str, flag: str) -> None:
    write(root, {"proc/cpuinfo": text})
    found = machine.cpu()
    assert found.model == model and (not flag or flag in found.flags) and "other" not in found.flags
    assert found.cores >= 1


def test_machine_does_not_import_torch() -> None:
    code = (
        "import sys, mycli.runtime.device.system as m, mycli.runtime.device.nvml; "
        "import mycli.runtime.device.bandwidth; m.memory(), m.cpu(); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_process_holds_grows_with_what_it_touches() -> None:
    """Run in a fresh process: an old one may free as much memory between the readings as it allocates."""
    code = (
        "import mycli.runtime.device.system as m; "
        "able = m.reset_peak(); before = m.resident(); "
        "block = bytearray(b'x') * (64 << 20); with_block = m.peak_resident() - before; "
        "del block; m.reset_peak(); "
        "print(int(able), with_block, m.peak_resident() - before)"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    able, with_block, without = map(int, ran.stdout.split())
    if not able:
        pytest.skip("the kernel does not reset the peak")
    assert with_block >= 60 << 20
    assert without < 32 << 20


def test_the_time_without_a_core_is_summed_over_threads(root: Path) -> None:
    """The fields of schedstat: nanoseconds on a core, nanoseconds waiting for one, time slices."""
    waits = {"7": "9000000000 1500000000 12\n", "8": "100 250000000 4\n", "9": ""}  # 9 has ended
    write(root, {f"proc/self/task/{thread}/schedstat": text for thread, text in waits.items()})
    assert machine.cpu_wait_seconds() == 1.75


def test_without_proc_nothing_is_said(root: Path) -> None:
    assert (machine.resident(), machine.peak_resident(), machine.reset_peak()) == (0, 0, False)
    assert machine.cpu_wait_seconds() is None


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_freed_memory_is_returned_where_malloc_can(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def record(*words: int) -> None:
        calls.append(words)

    library = SimpleNamespace(malloc_trim=record, mallopt=record)
    monkeypatch.setattr(machine.sys, "platform", platform)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: library)
    machine.release_free_memory()
    machine.trim_heap(1 << 20)
    machine.reuse_freed_memory()
    trimmed: list[tuple[int, ...]] = [(0,), (-3, 1 << 20), (-1, 64 << 20), (0,)]
    expected = [*trimmed, (-3, 1 << 30), (-1, (1 << 31) - 1)] if platform == "linux" else []
    assert calls == expected
    del library.malloc_trim  # musl has none
    machine.trim_heap()
    machine.reuse_freed_memory()
    machine.release_free_memory()
    assert calls == expected
