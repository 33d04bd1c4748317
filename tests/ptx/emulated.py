"""Run test functions in a process whose Triton launches go to the emulator; compare `support.triton_interpreter`.

A process emulates one compute capability; it starts on first use and ends with this process.
"""

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from tests.ptx.emulator.device import Device
from tests.ptx.emulator.translate import HERE

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


def _guard(folder: Path, where: str) -> dict[str, str]:
    """Return the environment in which every tensor has a page without access after or before it (`guard.cpp`)."""
    folder.mkdir(parents=True, exist_ok=True)
    library, part = folder / "guard.so", folder / f"guard.{os.getpid()}"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(part), str(HERE / "guard.cpp")]
    subprocess.run(command, check=True)
    part.replace(library)
    return {"LD_PRELOAD": str(library), "GUARD": where}


@cache
def _pool(folder: Path, capability: int, guard: str) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, context, _set_up, (folder, capability))
    with mock.patch.dict(os.environ, _guard(folder, guard) if guard else {}):
        pool.submit(os.getpid).result()  # starts the process, which keeps a copy of the environment
    return pool


def emulate(
    folder: Path, capability: int, function: Callable[..., object], *arguments: object, guard: str | None = None
) -> Any:
    """Return the result of a module-level function, computed in the emulator. `folder` caches what is compiled.

    guard: "after" or "before" each tensor every access fails the launch; "" nowhere; None: MYCLI_TEST_GUARD says it.
    """
    where = os.environ.get("MYCLI_TEST_GUARD", "") if guard is None else guard
    return _pool(folder, capability, where).submit(function, *arguments).result()
