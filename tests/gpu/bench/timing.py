"""Time a sequence of calls: one CUDA graph replayed between events, or plain calls on the CPU, interleaved.

The calls of a sequence should use different memory (`copies`); otherwise the device's caches are measured.
"""

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from mycli.runtime.device.nvml import Nvml

Call = Callable[[], object]
_CLOCK_SM = 1  # the index that NVML uses
ROTATED = 200_000_000  # bytes of rotating weights: several times the L2 cache of any GPU


@dataclass(frozen=True)
class Context:
    """The device and the precision of measurement. `limits`: filled by the first part."""

    device: torch.device
    tiny: bool = False
    rounds: int = 5
    limits: dict[str, float] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        """Return whether graphs, events and streams exist."""
        return self.device.type == "cuda"

    def clock(self) -> dict[str, int]:
        """Return the current MHz of the multiprocessors, for a row; empty without a GPU that reports it."""
        if not self.cuda:
            return {}
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:  # missing in some containers; a row is valid without its clock
            return {}
        found = megahertz(library, f"GPU-{torch.cuda.get_device_properties(self.device).uuid}")
        return {} if found is None else {"MHz": found}

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)


def megahertz(library: Any, uuid: str) -> int | None:
    """Return the current clock of a GPU's multiprocessors by NVML; None if unavailable, as for a MIG instance."""
    clock = ctypes.c_uint()
    try:
        with closing(Nvml(library)) as nvml:
            failed = library.nvmlDeviceGetClockInfo(nvml.by_uuid(uuid), _CLOCK_SM, ctypes.byref(clock))
    except OSError:
        return None
    return None if failed else clock.value


def copies(nbytes: int, context: Context) -> int:
    """Return how many copies of a weight to rotate through: at least 4, and `ROTATED` bytes in all."""
    return 2 if context.tiny else max(4, -(-ROTATED // nbytes))


def replay(calls: Sequence[Call], context: Context) -> Callable[[], float]:
    """Return a function that runs all `calls` once and returns seconds per call. Compiled and captured beforehand."""
    if not context.cuda:
        for call in calls:
            call()

        def plain() -> float:
            began = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - began) / len(calls)

        return plain
    stream = torch.cuda.Stream(context.device)
    stream.wait_stream(torch.cuda.current_stream(context.device))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream(context.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    torch.cuda.synchronize(context.device)

    def replayed() -> float:
        graph.replay()  # before the events, so that the clock is up and the host has run ahead
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / len(calls)

    return replayed


def in_turns(measured: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return samples of each; rounds run A B C A, so that clock drift affects all; the first has twice as many."""
    names = list(measured)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in [*names, *names[:1]] if len(names) > 1 else names:
            samples[name].append(measured[name]())
    return samples
