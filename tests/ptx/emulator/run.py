"""Compile translated kernels with the host's compiler, cache them, and run them on the memory of this process."""

import ctypes
import hashlib
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ptx.emulator.translate import HERE, Access, translate_counting

# -Og: compiling takes longer than running. No fused multiply-add except where the GPU fuses.
FLAGS = ("-std=c++17", "-Og", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-fno-strict-aliasing", f"-I{HERE}")
WINDOW = 64  # programs that run concurrently


class LaunchFailed(Exception):
    """The kernel did something that is an error on a GPU, or whose result differs between runs there."""


class _Cost(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("requests", "made", "least"))


@dataclass(frozen=True)
class Cost:
    """The cost of an instruction in a launch: shared memory wavefronts or global memory sectors, and the minimum."""

    access: Access
    shared: bool
    requests: int
    made: int
    least: int


@dataclass
class Runner:
    """Runs kernels, compiled once into `folder`. seed: order of programs and warps, different for every launch.

    count: add to `costs` what the memory accesses of each launch cost. races: two unordered accesses to the same
    global memory fail the launch. starved: one program at a time is hardly ever scheduled.
    """

    folder: Path
    seed: int = 1
    count: bool = False
    races: bool = False
    starved: bool = False
    costs: list[Cost] = field(default_factory=list)
    _libraries: dict[tuple[str, bool, bool], tuple[ctypes.CDLL, list[Access]]] = field(default_factory=dict)

    def library(self, ptx: str) -> tuple[ctypes.CDLL, list[Access]]:
        """Return the compiled kernel of a module and the accesses that it counts. Raises UnknownInstruction."""
        key = ptx, self.count, self.races
        if key not in self._libraries:
            source, accesses = translate_counting(ptx)
            source = "#define COUNT\n" * self.count + "#define RACE\n" * self.races + source
            headers = "".join((HERE / name).read_text("utf-8") for name in ("machine.h", "scheduler.h"))
            digest = hashlib.sha256("\0".join((source, headers, *FLAGS[:-1])).encode()).hexdigest()[:24]
            target = self.folder / f"{digest}.so"
            if not target.exists():
                self._compile(source, target)
            found = ctypes.CDLL(str(target))
            found.run.restype = ctypes.c_char_p
            if self.count:
                found.costs.restype = ctypes.POINTER(_Cost)
            self._libraries[key] = found, accesses
        return self._libraries[key]

    def _compile(self, source: str, target: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{id(self)}.part")
        command = ["g++", *FLAGS, "-x", "c++", "-", "-o", str(part)]
        done = subprocess.run(command, input=source, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the translation does not compile: {done.stderr[:2000]}")
        part.replace(target)  # another process may have created the same file meanwhile

    def launch(self, ptx: str, grid: tuple[int, int, int], threads: int, shared: int, parameters: Any) -> None:
        """Run a kernel whose `parameters` (void**) are in this process. Raises LaunchFailed."""
        self.seed += 1
        sizes = (ctypes.c_uint(size) for size in (*grid, threads, shared))
        window, seed, starved = ctypes.c_uint(WINDOW), ctypes.c_uint64(self.seed), ctypes.c_uint(self.starved)
        library, accesses = self.library(ptx)
        if self.count:
            library.forget_costs()
        said = library.run(*sizes, parameters, window, seed, starved).decode()
        if said:
            raise LaunchFailed(said)
        if self.count:
            self.costs += [
                Cost(access, not space, cost.requests, cost.made, cost.least)
                for space in range(2)
                for access, cost in zip(accesses, library.costs(space)[: len(accesses)], strict=True)
                if cost.requests
            ]
