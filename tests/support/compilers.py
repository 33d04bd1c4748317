"""Stand-ins for the compiler of the CPU kernels: shell scripts that say they are GNU's."""

import stat
from pathlib import Path

from mycli.runtime.kernels.cpu.library import build


def fake_compiler(folder: Path, body: str) -> Path:
    """A g++ in `folder` that runs `body`, a part of a shell script, on what it is asked to compile."""
    path = folder / "g++"
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "Free Software Foundation"; exit; fi\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def copying_compiler(folder: Path) -> Path:
    """One that takes half a second and gives this machine's library, which must be built, whatever it is asked for."""
    library = build.compile_library(build.cache_folder(), build._choose()[1])
    copy = 'while [ "$1" != -o ]; do shift; done'
    return fake_compiler(folder, f'{copy}; sleep 0.25; cp "{library}" "$2"')
