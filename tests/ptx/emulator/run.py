"""Translated kernels compiled with the host's compiler, kept, and run on the memory of this process."""

import ctypes
import hashlib
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ptx.emulator.translate import HERE, translate

# -Og: compiling takes longer than running. A sum must not be fused where the GPU does not fuse it.
FLAGS = ("-std=c++17", "-Og", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-fno-strict-aliasing", f"-I{HERE}")
WINDOW = 64  # programs under way at a time


class LaunchFailed(Exception):
    """A kernel did what a GPU would not let it do, or what differs from run to run there."""


@dataclass
class Runner:
    """Runs kernels, compiled once into `folder`. seed: of the order of programs and warps, another for every launch."""

    folder: Path
    seed: int = 1
    _libraries: dict[str, ctypes.CDLL] = field(default_factory=dict)

    def library(self, ptx: str) -> ctypes.CDLL:
        """The kernel of a module, ready to run. Raises UnknownInstruction."""
        if ptx not in self._libraries:
            source = translate(ptx)
            headers = "".join((HERE / name).read_text("utf-8") for name in ("machine.h", "scheduler.h"))
            digest = hashlib.sha256("\0".join((source, headers, *FLAGS[:-1])).encode()).hexdigest()[:24]
            target = self.folder / f"{digest}.so"
            if not target.exists():
                self._compile(source, target)
            found = ctypes.CDLL(str(target))
            found.run.restype = ctypes.c_char_p
            self._libraries[ptx] = found
        return self._libraries[ptx]

    def _compile(self, source: str, target: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{id(self)}.part")
        command = ["g++", *FLAGS, "-x", "c++", "-", "-o", str(part)]
        done = subprocess.run(command, input=source, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the translation does not compile: {done.stderr[:2000]}")
        part.replace(target)  # another process may have made the same meanwhile

    def launch(self, ptx: str, grid: tuple[int, int, int], threads: int, shared: int, parameters: Any) -> None:
        """Run a kernel whose `parameters` (void**) lie in this process. Raises LaunchFailed."""
        self.seed += 1
        sizes = (ctypes.c_uint(size) for size in (*grid, threads, shared))
        window, seed = ctypes.c_uint(WINDOW), ctypes.c_uint64(self.seed)
        said = self.library(ptx).run(*sizes, parameters, window, seed).decode()
        if said:
            raise LaunchFailed(said)
