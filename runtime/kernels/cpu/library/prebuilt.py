"""Libraries that a wheel carries: one for each set of instructions, for machines without a compiler.

They lie in the folder `prebuilt` beside this file, named by their set and a hash of sources and flags: what was made of
other sources is not found. Nothing of theirs says which OpenMP library they want, which goes by many names in torch's
packages: they take the one that torch has loaded. Knows names and files; not how a library is used.
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
# The C++ library is the system's, as torch wants it too: inside, a new one would want a new C library.
_LINK = ("-Wl,--as-needed", "-s")


def _file_name(name: str) -> str:
    flags = (*FLAGS, _BASELINE, *isa.portable_flags()[name], *_LINK)
    return f"packed_cpu-{name}-{digest(read_sources(), *flags)}.so"


def find(name: str, folder: Path = FOLDER) -> Path | Declined:
    """The library for `isa.portable_name`, or the reason why there is none."""
    if not folder.is_dir():
        return Declined("no-prebuilt-library")
    if name not in isa.portable_flags():
        return Declined("no-prebuilt-for-processor", {"instructions": name})
    path = folder / _file_name(name)
    return path if path.is_file() else Declined("prebuilt-from-other-sources", {"file": path.name})


def show_openmp() -> None:
    """Let libraries that are loaded from now on see torch's OpenMP. Raises BuildError where torch has none."""
    ctypes.CDLL(torch_openmp(), mode=ctypes.RTLD_GLOBAL)


def compile_portable(name: str, folder: Path) -> Path:
    """The library `name` of `isa.portable_flags` in `folder`, for any machine that has these instructions.

    Raises BuildError where it cannot be compiled.
    """
    compiler, _ = find_compiler()
    flags = (*FLAGS, _BASELINE, *isa.portable_flags()[name])
    compile_sources(compiler, read_sources(), flags, _LINK, folder / _file_name(name))
    return folder / _file_name(name)
