"""Reads /proc and /sys/fs/cgroup: memory that this process may use, memory that it uses, and the CPU."""

import ctypes
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
    """`cores`: logical CPUs this process may run on; `flags`: Linux's names of instructions (avx512_vnni, asimd)."""

    model: str
    cores: int
    flags: frozenset[str]


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


def _cgroups() -> Iterator[tuple[Path, str, str, str]]:
    # Every memory cgroup of this process, innermost first: folder, limit file, usage file, key of inactive pages.
    for line in _read(_PROC / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount, names = _CGROUP, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = _CGROUP / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's; folders that do not exist here are skipped by the caller.
        folder = mount / path.strip("/")
        for level in (folder, *folder.parents):
            yield (level, *names)
            if level == mount:
                break


def memory() -> Memory:
    """Return the memory of the machine, or of the cgroup with the least available memory."""
    info = _pairs(_PROC / "meminfo")
    total, available = info.get("MemTotal", 0) * 1024, info.get("MemAvailable", 0) * 1024
    if not total:  # no /proc, as on macOS, where free memory is unknown
        total = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    best = Memory(total, available, "machine")
    for folder, limit_file, usage_file, cache_key in _cgroups():
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is None or usage is None or limit >= total:
            continue
        # Inactive file pages count as usage but are reclaimed when memory is allocated.
        free = max(0, limit - usage + _pairs(folder / "memory.stat").get(cache_key, 0))
        if min(free, limit) < best.available:
            best = Memory(limit, min(free, limit), str(folder))
    return best


def cpu() -> Cpu:
    """Return the CPU as /proc/cpuinfo describes its first core; unknown fields are empty."""
    fields: dict[str, str] = {}
    for line in _read(_PROC / "cpuinfo").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", ""))
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Cpu(fields.get("model name", ""), cores, frozenset(flags.split()))


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
