"""What this machine has: memory that may really be used, the CPU, and NVIDIA GPUs as their driver reports them.

Reads /proc, /sys/fs/cgroup and the driver's NVML library (https://docs.nvidia.com/deploy/nvml-api). Does not import
torch, starts no process, makes no CUDA context, and does not know what a model needs.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mycli.runtime.errors import ResourceError

# Memory bandwidth in GB/s (10^9 bytes per second) from the makers' data sheets, by the name NVML gives, vendor removed.
# An exact name only: the laptop part of the same number has half the bandwidth.
BANDWIDTH: Mapping[str, float] = {
    "A10": 600,
    "A10G": 600,
    "A40": 696,
    "A100-PCIE-40GB": 1555,
    "A100-SXM4-40GB": 1555,
    "A100 80GB PCIe": 1935,
    "A100-SXM4-80GB": 2039,
    "B200": 8000,
    "GH200 480GB": 4000,
    "H20": 4000,
    "H100 PCIe": 2000,
    "H100 NVL": 3900,
    "H100 80GB HBM3": 3350,
    "H200": 4800,
    "H200 NVL": 4800,
    "L4": 300,
    "L40": 864,
    "L40S": 864,
    "RTX 6000 Ada Generation": 960,
    "RTX A6000": 768,
    "RTX PRO 6000 Blackwell Server Edition": 1597,
    "RTX PRO 6000 Blackwell Workstation Edition": 1792,
    "RTX 3060": 360,
    "RTX 3080": 760,
    "RTX 3090": 936,
    "RTX 3090 Ti": 1008,
    "RTX 4060": 272,
    "RTX 4060 Ti": 288,
    "RTX 4070": 504,
    "RTX 4070 SUPER": 504,
    "RTX 4070 Ti": 504,
    "RTX 4070 Ti SUPER": 672,
    "RTX 4080": 717,
    "RTX 4080 SUPER": 736,
    "RTX 4090": 1008,
    "RTX 5070": 672,
    "RTX 5070 Ti": 896,
    "RTX 5080": 960,
    "RTX 5090": 1792,
    "T4": 320,
    "V100-SXM2-16GB": 900,
    "V100-SXM2-32GB": 900,
}


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


@dataclass(frozen=True)
class Gpu:
    """One GPU that CUDA would show this process; memory in bytes, other processes' use already taken off `free`."""

    index: int
    name: str
    total: int
    free: int
    capability: tuple[int, int]
    driver: str


def _number(path: Path) -> int | None:
    """The integer in a file of /sys; None where the file is missing, unreadable, or says "max"."""
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _pairs(path: Path) -> dict[str, int]:
    """ "key value" or "key: value kB" lines of /proc and /sys, as they stand; empty where the file is missing."""
    pairs = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            pairs[words[0].rstrip(":")] = int(words[1])
    return pairs


def _cgroups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Every memory cgroup this process is in, innermost first, as (folder, limit file, usage file, cache key)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's: only what exists here counts, up to the mount itself.
        folder = mount / path.strip("/")
        for level in (folder, *folder.parents):
            yield (level, *names)
            if level == mount:
                break


def memory(root: Path = Path("/")) -> Memory:
    """The memory of the machine, or of the tightest cgroup around this process; `root` is for tests.

    Within a cgroup: limit - (usage - inactive file pages), since those pages are given back when memory is asked for.
    """
    info = _pairs(root / "proc/meminfo")
    total, available = info.get("MemTotal", 0) * 1024, info.get("MemAvailable", 0) * 1024
    if not total:  # no /proc, as on macOS: nothing says what is in use
        total = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    best = Memory(total, available, "machine")
    for folder, limit_file, usage_file, cache_key in _cgroups(root):
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is None or usage is None or limit >= total:
            continue
        free = max(0, limit - usage + _pairs(folder / "memory.stat").get(cache_key, 0))
        if min(free, limit) < best.available:
            best = Memory(limit, min(free, limit), str(folder))
    return best


def cpu(root: Path = Path("/")) -> Cpu:
    """The CPU as /proc/cpuinfo describes its first core; empty strings where it does not."""
    fields: dict[str, str] = {}
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", ""))
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Cpu(fields.get("model name", ""), cores, frozenset(flags.split()))


def bandwidth(name: str) -> float | None:
    """Data-sheet memory bandwidth of a GPU in GB/s by its NVML name; None for one that is not in the table."""
    for vendor in ("NVIDIA ", "GeForce ", "Tesla "):
        name = name.removeprefix(vendor)
    return BANDWIDTH.get(name)


_DRIVER_NOT_LOADED = 9  # the library is there, as in many container images, and no device


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Nvml:
    """The calls of NVML used here, on a library loaded by ctypes; each raises OSError with NVML's code."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._call("nvmlInit_v2")

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise OSError(code, f"{name} failed with NVML code {code}")

    def _string(self, name: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(96)
        self._call(name, *arguments, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def handles(self) -> list[ctypes.c_void_p]:
        """All devices, in NVML's (PCI bus) order."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        result = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
            result.append(handle)
        return result

    def by_uuid(self, uuid: str) -> ctypes.c_void_p:
        """A device or MIG instance by its whole UUID."""
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return handle

    def uuid(self, handle: ctypes.c_void_p) -> str:
        """GPU-xxxxxxxx-xxxx-..."""
        return self._string("nvmlDeviceGetUUID", handle)

    def describe(self, handle: ctypes.c_void_p, index: int) -> Gpu:
        """The Gpu that CUDA would number `index`."""
        memory, major, minor = _NvmlMemory(), ctypes.c_int(), ctypes.c_int()
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        self._call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
        name, driver = self._string("nvmlDeviceGetName", handle), self._string("nvmlSystemGetDriverVersion")
        return Gpu(index, name, memory.total, memory.free, (major.value, minor.value), driver)

    def close(self) -> None:
        """Undo nvmlInit."""
        self._call("nvmlShutdown")


def _visible(nvml: Nvml, setting: str | None) -> list[ctypes.c_void_p]:
    """The devices CUDA_VISIBLE_DEVICES leaves, in its order; like CUDA, everything after the first bad entry is cut."""
    handles = nvml.handles()
    if setting is None:
        return handles
    chosen: list[ctypes.c_void_p] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.startswith("MIG-"):
            try:
                chosen.append(nvml.by_uuid(entry))
                continue
            except OSError:
                break
        if entry.startswith("GPU-"):
            matches = [handle for handle in handles if nvml.uuid(handle).startswith(entry)]
        else:
            matches = handles[int(entry) : int(entry) + 1] if entry.isdecimal() else []
        if len(matches) != 1:
            break
        chosen += matches
    return chosen


def _load_nvml() -> Any:
    return ctypes.CDLL("libnvidia-ml.so.1")


def gpus(environment: Mapping[str, str] | None = None, load: Callable[[], Any] = _load_nvml) -> list[Gpu]:
    """The NVIDIA GPUs visible to this process; empty without a driver. `environment` is os.environ unless given.

    NVML counts by PCI bus. CUDA does so only with CUDA_DEVICE_ORDER=PCI_BUS_ID; on a machine with different GPUs the
    numbers may differ. Raises ResourceError where a driver is installed but does not answer.
    """
    setting = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    try:
        library = load()
    except OSError:
        return []
    try:
        try:
            nvml = Nvml(library)
        except OSError as error:
            if error.errno == _DRIVER_NOT_LOADED:
                return []
            raise
        try:
            return [nvml.describe(handle, index) for index, handle in enumerate(_visible(nvml, setting))]
        finally:
            nvml.close()
    except OSError as error:
        raise ResourceError(f"the NVIDIA driver does not answer: {error.strerror}", "nvidia-smi shows more") from None
