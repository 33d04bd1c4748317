"""Prebuilt native libraries of a wheel: one for each instruction set, for machines without a compiler.

A file name holds the instruction set and a hash of sources and flags, so a library made from other sources is not used.
"""

import ctypes
from pathlib import Path

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import isa
from mycli.runtime.kernels.cpu.library.compiler import (
    FLAGS,
    compile_sources,
    digest,
    find_compiler,
    read_sources,
    torch_openmp,
)

FOLDER = Path(__file__).parents[1] / "prebuilt"
_BASELINE = "-march=x86-64"
# The C++ library is the system's, which torch needs too: a static one of a new compiler would need a new C library.
# OpenMP is not linked at all: torch's packages name it in many ways, so `show_openmp` makes the loaded one visible.
_LINK = ("-Wl,--as-needed", "-s")


def _file_name(name: str) -> str:
    flags = (*FLAGS, _BASELINE, *isa.portable_flags()[name], *_LINK)
    return f"packed_cpu-{name}-{digest(read_sources(), *flags)}.so"


def find(name: str, folder: Path = FOLDER) -> Path | Declined:
    """Return the library called `name` by `isa.portable_name`, or why there is none."""
    if not folder.is_dir():
        return Declined("no-prebuilt-library")
    if name not in isa.portable_flags():
        return Declined("no-prebuilt-for-processor", {"instructions": name})
    path = folder / _file_name(name)
    return path if path.is_file() else Declined("prebuilt-from-other-sources", {"file": path.name})


def show_openmp() -> None:
    """Make torch's OpenMP visible to libraries that are loaded from now on. Raises BuildError if torch has none."""
    ctypes.CDLL(torch_openmp(), mode=ctypes.RTLD_GLOBAL)


def compile_portable(name: str, folder: Path) -> Path:
    """Compile the library `name` of `isa.portable_flags` into `folder`; return its path. Raises BuildError."""
    compiler, _ = find_compiler()
    flags = (*FLAGS, _BASELINE, *isa.portable_flags()[name])
    compile_sources(compiler, read_sources(), flags, _LINK, folder / _file_name(name))
    return folder / _file_name(name)
