"""Run test functions in a process whose Triton launches go to the emulator; compare `support.triton_interpreter`.

A process emulates one compute capability; it starts on first use and ends with this process.
"""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from tests.ptx.emulator.device import Device

_HERE: list[Device] = []  # the device of an emulator process


def _set_up(folder: Path, capability: int) -> None:
    """Set up the emulator's device; uninitialized memory holds NaN."""
    import torch

    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    _HERE.append(Device.set_up(folder, capability))


def device() -> Device:
    """Return the device of the current process."""
    return _HERE[0]


@cache
def _pool(folder: Path, capability: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, _set_up, (folder, capability))


def emulate(folder: Path, capability: int, function: Callable[..., object], *arguments: object) -> Any:
    """Return the result of a module-level function, computed in the emulator. `folder` caches what is compiled."""
    return _pool(folder, capability).submit(function, *arguments).result()
