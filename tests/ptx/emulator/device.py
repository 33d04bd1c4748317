"""Emulate a Triton device on CPU tensors in this process: Triton's compiler and launcher over a driver stub.

It must be set up before any kernel is launched, in a process of its own: Triton has one active driver.
"""

import ctypes
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.ptx.emulator.run import Runner
from tests.ptx.emulator.translate import HERE

_TOLD = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
)
_FAILED = 719  # CUDA_ERROR_LAUNCH_FAILED


@dataclass(frozen=True)
class Launched:
    """The arguments of one launch at the driver. overlap: it may begin before the previous one ends."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    overlap: bool


@dataclass
class Device:
    """The device of this process. change: applied to the PTX of every kernel, for tests of the emulator itself."""

    capability: int
    runner: Runner
    change: Callable[[str], str] = lambda ptx: ptx
    launches: list[Launched] = field(default_factory=list)
    _modules: dict[int, tuple[str, str]] = field(default_factory=dict)
    _kept: list[object] = field(default_factory=list)  # the buffers that C has pointers to

    @classmethod
    def set_up(cls, folder: Path, capability: int) -> "Device":
        """Make this the active driver of Triton. `folder` caches what is compiled."""
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / "libcuda.so.1"
        part = folder / f"libcuda.{os.getpid()}"
        source = str(HERE / "driver_stub.c")
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", str(part), source]
        subprocess.run(command, check=True)
        part.replace(library)
        link = folder / "libcuda.so"
        if not link.is_symlink():
            link.symlink_to(library.name)
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        stub = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        found = cls(capability, Runner(folder))
        found._activate(stub)
        return found

    def _activate(self, stub: ctypes.CDLL) -> None:
        import triton
        from triton.backends.nvidia import driver as nvidia
        from triton.compiler import compiler

        capability = divmod(self.capability, 10)

        class Stubbed(nvidia.CudaDriver):  # type: ignore[misc]  # Triton has no types
            def __init__(self) -> None:
                self.utils = nvidia.CudaUtils()
                self.launcher_cls = nvidia.CudaLauncher
                self.get_current_device = lambda: 0
                self.set_current_device = lambda device: None
                self.get_current_stream = lambda device: 0
                self.get_device_capability = lambda device=0: capability

            def get_active_torch_device(self) -> torch.device:
                return torch.device("cpu")

        loaded = compiler.CompiledKernel._init_handles

        def load(kernel: Any) -> None:
            """Map the stub's function handle to the kernel's name and PTX."""
            loaded(kernel)
            if kernel.function is not None:
                self._modules.setdefault(kernel.function, (kernel.metadata.name, kernel.asm["ptx"]))

        compiler.CompiledKernel._init_handles = load
        triton.runtime.driver.set_active(Stubbed())
        told = _TOLD(lambda *launch: self._launch(stub, *launch))
        self._kept += [stub, told]
        stub.stub_begin(told, 132)

    def _launch(
        self, stub: ctypes.CDLL, function: int, grid: Any, block: Any, shared: int, overlap: int, parameters: Any
    ) -> int:
        """Return the driver's status: Triton's launcher raises a failure as an error with its message."""
        name, ptx = self._modules[function]
        sizes = grid[0], grid[1], grid[2]
        self.launches.append(Launched(name, sizes, block[0], shared, bool(overlap)))
        try:
            self.runner.launch(self.change(ptx), sizes, block[0], shared, parameters)
        except Exception as error:  # noqa: BLE001  (reason: only a number and a text can pass through C)
            said = ctypes.c_char_p(f"{name}: {type(error).__name__}: {error}".encode())
            self._kept.append(said)
            stub.stub_say(said)
            return _FAILED
        return 0
