"""Where a model would run and how much memory and bandwidth there is, without importing torch.

Knows the names of devices, this machine and its notes. What really runs is decided by `runtime.device.placement`,
which asks torch; the two differ only where torch cannot use a GPU that the driver shows.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from mycli.runtime.device.bandwidth import datasheet, remembered
from mycli.runtime.device.nvml import gpus
from mycli.runtime.device.system import cpu, memory
from mycli.runtime.errors import ResourceError, UsageError
from mycli.runtime.utils.units import pluralize


@dataclass(frozen=True)
class Target:
    """A place for a model. `free` is bytes not in use; `bandwidth` in GB/s with where it is from, None if unknown."""

    place: str  # cuda:0, cpu
    name: str
    gpu: bool
    free: int
    bandwidth: float | None = None
    bandwidth_source: str = ""
    notes: tuple[str, ...] = ()


def _with_bandwidth(target: Target, notes: Path) -> Target:
    measured = remembered(notes, target.name)
    if measured is not None:
        return replace(target, bandwidth=measured, bandwidth_source="best measured here")
    sheet = datasheet(target.name) if target.gpu else None
    return replace(target, bandwidth=sheet, bandwidth_source="data sheet" if sheet else "")


def cpu_name() -> str:
    """What the CPU is called in notes and results."""
    return cpu().model or "CPU"


def find_target(device: str, notes: Path) -> Target:
    """The target that `device` (auto, cpu, cuda, cuda:N) means; `notes` is the folder of measurements.

    Raises UsageError for another word, ResourceError for a GPU that is not there: only auto falls back to the CPU, and
    says why.
    """
    name, _, index = device.partition(":")
    if device not in ("auto", "cpu", "cuda") and (name != "cuda" or not index.isdecimal()):
        raise UsageError(f"device {device}: not a device", "use auto, cpu, cuda or cuda:N")
    reasons: tuple[str, ...] = ()
    if device != "cpu":
        try:
            found = gpus()
        except ResourceError as error:
            if device != "auto":
                raise
            found, reasons = [], (f"counting on the CPU: {error.message}",)
        if int(index or 0) < len(found):
            gpu = found[int(index or 0)]
            return _with_bandwidth(Target(f"cuda:{gpu.index}", gpu.name, True, gpu.free), notes)
        if device != "auto":
            visible = pluralize(len(found), "NVIDIA GPU")
            raise ResourceError(f"device {device}: {visible} visible", code="use-cpu-or-pretend-gpu")
    return _with_bandwidth(Target("cpu", cpu_name(), False, memory().available, notes=reasons), notes)
