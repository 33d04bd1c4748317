"""What this machine has: memory that may really be used, what this process takes of it, and the CPU.

Reads /proc and /sys/fs/cgroup. Does not import torch, does not know GPUs or what a model needs.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """Main memory in bytes. `available` is what a process may still take without swapping or being killed."""

    total: int
    available: int
    limit: str  # what bounds it: "machine", or the cgroup folder (a container's limit)


@dataclass(frozen=True)
class Cpu:
    """`cores` counts the logical CPUs this process may run on; `flags` are the kernel's names (avx512_vnni, asimd)."""

    model: str
    cores: int
    flags: frozenset[str]


def _read(path: Path) -> str:
    """The text of a file of /proc or /sys; empty where it is missing or unreadable."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The integer in a file of /sys; None where there is none, or it says "max"."""
    word = _read(path).strip()
    return int(word) if word.isdecimal() else None


def _pairs(path: Path) -> dict[str, int]:
    """ "key value" or "key: value kB" lines of /proc and /sys, as they stand; empty where the file is missing."""
    pairs = {}
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            pairs[words[0].rstrip(":")] = int(words[1])
    return pairs


def _cgroups() -> Iterator[tuple[Path, str, str, str]]:
    """Every memory cgroup this process is in, innermost first, as (folder, limit file, usage file, cache key)."""
    for line in _read(_PROC / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount, names = _CGROUP, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = _CGROUP / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's: only what exists here counts, up to the mount itself.
        folder = mount / path.strip("/")
        for level in (folder, *folder.parents):
            yield (level, *names)
            if level == mount:
                break


def memory() -> Memory:
    """The memory of the machine, or of the tightest cgroup around this process.

    Within a cgroup: limit - (usage - inactive file pages), since those pages are given back when memory is asked for.
    """
    info = _pairs(_PROC / "meminfo")
    total, available = info.get("MemTotal", 0) * 1024, info.get("MemAvailable", 0) * 1024
    if not total:  # no /proc, as on macOS: nothing says what is in use
        total = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    best = Memory(total, available, "machine")
    for folder, limit_file, usage_file, cache_key in _cgroups():
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is None or usage is None or limit >= total:
            continue
        free = max(0, limit - usage + _pairs(folder / "memory.stat").get(cache_key, 0))
        if min(free, limit) < best.available:
            best = Memory(limit, min(free, limit), str(folder))
    return best


def cpu() -> Cpu:
    """The CPU as /proc/cpuinfo describes its first core; empty strings where it does not."""
    fields: dict[str, str] = {}
    for line in _read(_PROC / "cpuinfo").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", ""))
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Cpu(fields.get("model name", ""), cores, frozenset(flags.split()))


def waited() -> float | None:
    """Seconds that the threads of this process could have run and had no core, since they began; None if unknown.

    The sum over threads of what the scheduler of Linux notes down (schedstat of proc(5)): other programs had the core.
    """
    tasks = list((_PROC / "self/task").glob("*/schedstat"))
    fields = [_read(path).split() for path in tasks]
    found = [int(words[1]) for words in fields if len(words) >= 2 and words[1].isdecimal()]
    return sum(found) / 1e9 if found else None


def resident() -> int:
    """Bytes of main memory that this process holds now; 0 where /proc does not say."""
    return _pairs(_PROC / "self/status").get("VmRSS", 0) * 1024


def peak_resident() -> int:
    """The most it held since it began, or since `reset_peak`."""
    return _pairs(_PROC / "self/status").get("VmHWM", 0) * 1024


def reset_peak() -> bool:
    """Let `peak_resident` begin anew; False where the kernel does not allow it (proc(5), clear_refs)."""
    try:
        (_PROC / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def trim(apart: int = 32 << 20) -> None:
    """As `release_free_memory`, and from now on freed blocks of `apart` bytes or more go back at once.

    glibc keeps smaller ones for later, in pieces (M_MMAP_THRESHOLD of mallopt(3)).
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):  # musl has none
            library.mallopt(-3, apart)
            release_free_memory()


def release_free_memory() -> None:
    """Give memory that was freed back to the system (malloc_trim(3))."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim"):
            library.malloc_trim(0)
