"""Replaces the compiler of the CPU kernels with shell scripts that report to be GNU's."""

import stat
from pathlib import Path

from mycli.runtime.kernels.cpu.library import build


def fake_compiler(folder: Path, body: str) -> Path:
    """Write a g++ to `folder` that runs `body`, a shell script fragment, for each compilation."""
    path = folder / "g++"
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "Free Software Foundation"; exit; fi\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def copying_compiler(folder: Path) -> Path:
    """Write a compiler that takes half a second and always outputs this machine's library, which must be built."""
    library = build.compile_library(build.cache_folder(), build._choose()[1])
    copy = 'while [ "$1" != -o ]; do shift; done'
    return fake_compiler(folder, f'{copy}; sleep 0.25; cp "{library}" "$2"')
