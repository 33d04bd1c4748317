"""Finds the device on which a model would run, its free memory and bandwidth, without importing torch.

`runtime.device.placement` chooses the device that is used; it differs only if torch cannot use a GPU of the driver.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from mycli.runtime.device.bandwidth import datasheet, recorded_bandwidth
from mycli.runtime.device.nvml import gpus
from mycli.runtime.device.system import cpu, memory
from mycli.runtime.errors import ResourceError, UsageError
from mycli.runtime.utils.units import pluralize


@dataclass(frozen=True)
class Target:
    """A device for a model: `free` in bytes, `bandwidth` in GB/s, None if unknown."""

    place: str  # "cuda:0", "cpu"
    name: str
    gpu: bool
    free: int
    bandwidth: float | None = None
    bandwidth_source: str = ""
    notes: tuple[str, ...] = ()


def _with_bandwidth(target: Target, records: Path) -> Target:
    measured = recorded_bandwidth(records, target.name)
    if measured is not None:
        return replace(target, bandwidth=measured, bandwidth_source="best measured here")
    sheet = datasheet(target.name) if target.gpu else None
    return replace(target, bandwidth=sheet, bandwidth_source="data sheet" if sheet else "")


def cpu_name() -> str:
    return cpu().model or "CPU"


def find_target(device: str, records: Path) -> Target:
    """Return the target for `device` (auto, cpu, cuda, cuda:N); `records` is the folder of recorded bandwidths.

    Raises UsageError for an unknown device, ResourceError for a missing GPU; only auto falls back to the CPU.
    """
    name, _, index = device.partition(":")
    if device not in ("auto", "cpu", "cuda") and (name != "cuda" or not index.isdecimal()):
        raise UsageError(f"unknown device {device!r}", "choose auto, cpu, cuda or cuda:N")
    reasons: tuple[str, ...] = ()
    if device != "cpu":
        try:
            visible = gpus()
        except ResourceError as error:
            if device != "auto":
                raise
            visible, reasons = [], (f"assuming the CPU: {error.message}",)
        if int(index or 0) < len(visible):
            gpu = visible[int(index or 0)]
            return _with_bandwidth(Target(f"cuda:{gpu.index}", gpu.name, True, gpu.free), records)
        if device != "auto":
            count = pluralize(len(visible), "NVIDIA GPU")
            raise ResourceError(f"device {device} not found: {count} visible", code="use-cpu-or-pretend-gpu")
    return _with_bandwidth(Target("cpu", cpu_name(), False, memory().available, notes=reasons), records)
