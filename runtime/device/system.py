"""Reads /proc and /sys/fs/cgroup: memory that this process may use, memory that it uses, and the CPU."""

import ctypes
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """Main memory in bytes."""

    total: int
    available: int  # can still be allocated without swapping or being killed
    limit: str  # what limits it: "machine", or the cgroup folder (a container's limit)


@dataclass(frozen=True)
class Cpu:
    """`cores`: threads that can run at the same time; `flags`: Linux's names of instructions (avx512_vnni, asimd)."""

    model: str
    cores: int
    flags: frozenset[str]
    quota: float | None = None  # of `cpu_quota`


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    word = _read(path).strip()
    return int(word) if word.isdecimal() else None  # "max" is no limit


def _pairs(path: Path) -> dict[str, int]:
    # Lines "key value" or "key: value kB".
    pairs = {}
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            pairs[words[0].rstrip(":")] = int(words[1])
    return pairs


def _cgroups(controller: str) -> Iterator[tuple[Path, bool]]:
    # Every cgroup of this process that may limit memory or cpu, innermost first: folder, and whether it is version 2.
    for line in _read(_PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        unified = not controllers  # only the line of version 2 names none
        if not unified and controller not in controllers.split(","):
            continue
        mount = _CGROUP if unified else _CGROUP / controller
        # Inside a container the path may be the host's; folders that do not exist here are skipped by the caller.
        folder = mount / path.strip("/")
        for level in (folder, *folder.parents):
            yield level, unified
            if level == mount:
                break


def memory() -> Memory:
    """Return the memory of the machine, or of the cgroup with the least available memory."""
    info = _pairs(_PROC / "meminfo")
    total, available = info.get("MemTotal", 0) * 1024, info.get("MemAvailable", 0) * 1024
    if not total:  # no /proc, as on macOS, where free memory is unknown
        total = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    best = Memory(total, available, "machine")
    for folder, unified in _cgroups("memory"):
        limit = _number(folder / ("memory.max" if unified else "memory.limit_in_bytes"))
        usage = _number(folder / ("memory.current" if unified else "memory.usage_in_bytes"))
        if limit is None or usage is None or limit >= total:
            continue
        # Pages of files count as usage but are reclaimed when memory is allocated. They are also active: those of a
        # model file that was read twice, or with the kernel's multi-generational LRU once.
        pages, prefix = _pairs(folder / "memory.stat"), "" if unified else "total_"
        files = sum(pages.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
        free = max(0, limit - usage + files)
        if min(free, limit) < best.available:
            best = Memory(limit, min(free, limit), str(folder))
    return best


def _allowed_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def cpu_quota() -> float | None:
    """Return the cores' time that cgroups allow a container, such as 1.5; None if it is that of all cores."""
    quotas = []
    for folder, unified in _cgroups("cpu"):
        if unified:
            words = _read(folder / "cpu.max").split()
        else:
            words = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):  # "max" and -1: no limit
            quotas.append(int(words[0]) / int(words[1]))
    quota = min(quotas, default=None)
    return None if quota is None or quota >= _allowed_cores() else quota


def usable_cores(quota: float | None) -> int:
    """Return how many threads can compute at the same time under `quota`, of `cpu_quota`."""
    return _allowed_cores() if quota is None else math.ceil(quota)


def cpu() -> Cpu:
    """Return the CPU as /proc/cpuinfo describes its first core; unknown fields are empty."""
    fields: dict[str, str] = {}
    for line in _read(_PROC / "cpuinfo").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags, quota = fields.get("flags", fields.get("Features", "")), cpu_quota()
    return Cpu(fields.get("model name", ""), usable_cores(quota), frozenset(flags.split()), quota)


def cpu_wait_seconds() -> float | None:
    """Return the seconds, summed over threads, in which this process was ready to run but had no core, or None."""
    # Second field of schedstat (proc(5)); a thread that ended in the meantime has none.
    tasks = [_read(path).split() for path in (_PROC / "self/task").glob("*/schedstat")]
    waits = [int(fields[1]) for fields in tasks if fields]
    return sum(waits) / 1e9 if waits else None


def resident() -> int:
    """Return the bytes of main memory that this process uses; 0 if unknown."""
    return _pairs(_PROC / "self/status").get("VmRSS", 0) * 1024


def peak_resident() -> int:
    """Return the peak of `resident` since the process started or `reset_peak` was called."""
    return _pairs(_PROC / "self/status").get("VmHWM", 0) * 1024


def reset_peak() -> bool:
    """Reset `peak_resident` to the current use; False if the kernel does not allow it (clear_refs, proc(5))."""
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


# Options of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def trim_heap(mmap_threshold: int = 32 << 20) -> None:
    """Call `release_free_memory`, and return freed blocks of `mmap_threshold` bytes or more immediately from now on."""
    # glibc caches smaller blocks in fragments.
    _set_thresholds(mmap_threshold, 64 << 20)
    release_free_memory()


def reuse_freed_memory() -> None:
    """Keep freed blocks of every size for later allocations, until `trim_heap`: for loops of equal allocations.

    A new block costs a page fault for each 4 KiB: a third of the time of a product with 40 MB of outputs.
    """
    _set_thresholds(1 << 30, (1 << 31) - 1)


def _set_thresholds(mmap: int, trim: int) -> None:
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):  # musl has none
            library.mallopt(_MMAP_THRESHOLD, mmap)
            library.mallopt(_TRIM_THRESHOLD, trim)


def release_free_memory() -> None:
    """Return freed memory to the system (malloc_trim(3))."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)
