"""What the native library is made of, and the compiler that makes it: GNU C++ of the system.

Knows sources, flags and processes; not where libraries are kept nor which one a machine wants.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from mycli.runtime.errors import Declined

# The longest first, with the compiler's options for each: what rounds as torch does rounds every operation on its own.
SOURCES: Mapping[str, tuple[str, ...]] = {
    "few_rows_cpu.cpp": (),
    "packed_cpu.cpp": (),
    "attention_cpu.cpp": (),
    "quantize_cpu.cpp": ("-ffp-contract=off",),
}
FLAGS = ("-std=c++17", "-I.", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi")
TIMEOUT = 1200  # seconds for the compiler on a busy machine; alone it needs most of one minute


class BuildError(Exception):
    """The native library cannot be compiled or loaded; `declined` says why."""

    def __init__(self, declined: Declined) -> None:
        super().__init__(f"{declined.code} {dict(declined.data)}")
        self.declined = declined


def find_compiler(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """(path, version text) of GNU C++: $CXX, else g++, else c++. Raises BuildError.

    Clang does not share GNU's OpenMP library, which is the one torch brings: its threads would be a second pool.
    """
    for name in (environment.get("CXX"), "g++", "c++"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=TIMEOUT).stdout
        if "Free Software Foundation" in version:
            return os.path.abspath(path), version  # it is started in another folder
    raise BuildError(Declined("no-compiler"))


def torch_openmp() -> str:
    """The OpenMP library that torch has loaded into this process. Raises BuildError where there is none."""
    with open("/proc/self/maps") as maps:
        loaded: set[str] = set(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*)", maps.read()))
    torch_folder = str(Path(torch.__file__).parent)
    for path in sorted(loaded, key=lambda one: (not one.startswith(torch_folder), one)):
        return path
    raise BuildError(Declined("no-openmp"))


def read_sources() -> dict[str, bytes]:
    """What the library is made of, by its path in the folder `native`."""
    root = Path(__file__).parents[1] / "native"
    found = sorted(path for path in root.rglob("*") if path.suffix in (".cpp", ".h"))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def digest(sources: Mapping[str, bytes], *depends: str) -> str:
    """Of sources and all else that a library depends on."""
    return hashlib.sha256(b"\0".join(sources.values()) + "\0".join(depends).encode()).hexdigest()[:24]


def compile_sources(
    compiler: str, sources: Mapping[str, bytes], flags: Sequence[str], link: Sequence[str], target: Path
) -> None:
    """A shared library at `target`, all at once; `link` comes behind the objects. Raises BuildError with the reason.

    The files of code are compiled side by side, as many as there are processors.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as work:
        for name, text in sources.items():
            (Path(work) / name).parent.mkdir(exist_ok=True)
            (Path(work) / name).write_bytes(text)
        commands = [[compiler, *flags, *own, "-c", name, "-o", f"{name}.o"] for name, own in SOURCES.items()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(partial(_run, work), commands))
        _run(work, [compiler, "-shared", *(f"{name}.o" for name in SOURCES), *link, "-o", "library.so"])
        os.replace(Path(work) / "library.so", target)


def _run(work: str, command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise BuildError(Declined("compiler-timeout", {"compiler": command[0], "seconds": TIMEOUT})) from None
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        error = f"{words[0]:.200}" if words else f"exit code {done.returncode}"
        raise BuildError(Declined("compiler-failed", {"compiler": command[0], "error": error}))
