"""Lists the NVIDIA GPUs visible to this process by NVML (https://docs.nvidia.com/deploy/nvml-api), without torch."""

import ctypes
import os
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from mycli.runtime.device.system import memory
from mycli.runtime.errors import ResourceError


@dataclass(frozen=True)
class Gpu:
    """A GPU visible to CUDA; memory in bytes, `free` excludes what other processes use."""

    index: int
    name: str
    total: int
    free: int
    capability: tuple[int, int]
    driver: str


_NOT_SUPPORTED = 3
_DRIVER_NOT_LOADED = 9  # the library exists, as in many container images, but there is no device


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Nvml:
    """The NVML calls used here; each raises OSError with NVML's code."""

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
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        result = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
            result.append(handle)
        return result

    def by_uuid(self, uuid: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return handle

    def uuid(self, handle: ctypes.c_void_p) -> str:
        return self._string("nvmlDeviceGetUUID", handle)

    def _memory(self, handle: ctypes.c_void_p) -> tuple[int, int]:
        # Total and free bytes. A GPU that shares the memory of the CPU, as that of a DGX Spark, has none of its own.
        info = _NvmlMemory()
        try:
            self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(info))
        except OSError as error:
            if error.errno != _NOT_SUPPORTED:
                raise
            shared = memory()
            return shared.total, shared.available
        return info.total, info.free

    def describe(self, handle: ctypes.c_void_p, index: int) -> Gpu:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
        name, driver = self._string("nvmlDeviceGetName", handle), self._string("nvmlSystemGetDriverVersion")
        return Gpu(index, name, *self._memory(handle), (major.value, minor.value), driver)

    def close(self) -> None:
        self._call("nvmlShutdown")


def _visible(nvml: Nvml, setting: str | None) -> list[ctypes.c_void_p]:
    # The devices in CUDA_VISIBLE_DEVICES, in its order; like CUDA, all entries from the first invalid one are ignored.
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


def gpus() -> list[Gpu]:
    """Return the GPUs visible to this process, none without a driver. Raises ResourceError if the driver fails."""
    # NVML numbers GPUs by PCI bus. CUDA does so only with CUDA_DEVICE_ORDER=PCI_BUS_ID: if the GPUs of a machine are
    # not alike, the numbers may differ.
    try:
        library = _load_nvml()
    except OSError:
        return []
    try:
        with closing(Nvml(library)) as nvml:
            visible = _visible(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
            return [nvml.describe(handle, index) for index, handle in enumerate(visible)]
    except OSError as error:
        if error.errno == _DRIVER_NOT_LOADED:
            return []
        raise ResourceError(f"the NVIDIA driver does not answer: {error.strerror}", "nvidia-smi shows more") from None
