"""The memory bandwidth of the device at hand: measured, and written down for `estimate`."""

from contextlib import suppress
from typing import TYPE_CHECKING

from mycli.runtime.device.bandwidth import remember
from mycli.runtime.device.probe import cpu_name
from mycli.runtime.hub.resolve import state

if TYPE_CHECKING:
    from mycli.runtime.device.placement import Placement

BYTES = 1 << 30  # larger than any cache; less where memory is short


def measure(placement: "Placement") -> tuple[str, float]:
    """The device's name, and GB/s."""
    import torch

    from mycli.runtime.device.placement import free_memory
    from mycli.runtime.diagnostics.throughput import measure_bandwidth

    device = placement.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    measured = measure_bandwidth(device, min(BYTES, free_memory(device) // 4))
    with suppress(OSError):  # where nothing can be written, nothing is
        remember(state(), name, measured)
    return name, measured
