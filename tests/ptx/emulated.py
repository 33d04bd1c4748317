"""Runs test functions in a process whose Triton launches go to the emulator; compare `support.triton_interpreter`.

A process plays one compute capability; it starts when it is first asked for and ends with this one.
"""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from tests.ptx.emulator.device import Device

_HERE: list[Device] = []  # the device of such a process


def _set_up(folder: Path, capability: int) -> None:
    """Memory that nobody wrote holds NaN."""
    import torch

    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    _HERE.append(Device.set_up(folder, capability))


def device() -> Device:
    """The device of the process that this runs in."""
    return _HERE[0]


@cache
def _pool(folder: Path, capability: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, _set_up, (folder, capability))


def emulate(folder: Path, capability: int, function: Callable[..., object], *arguments: object) -> Any:
    """The result of a module-level function, computed there. `folder` keeps what is compiled."""
    return _pool(folder, capability).submit(function, *arguments).result()
