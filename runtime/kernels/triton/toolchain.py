"""Finds out why Triton cannot launch kernels on a machine: it compiles a launcher in C when a kernel first runs.

Kernels and launchers are kept in a folder, which must be writable.
"""

import os
import shutil
import sysconfig
from pathlib import Path

from mycli.runtime.errors import Declined


def missing_tool() -> Declined | None:
    # As Triton looks for them (triton/runtime/build.py).
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return Declined("no-c-compiler")
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        return Declined("no-python-headers", {"folder": str(include)})
    return None if _is_writable(folder := _cache_folder()) else Declined("triton-cache-unwritable", {"folder": folder})


def _cache_folder() -> str:
    # As Triton chooses it (triton/knobs.py).
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")


def _is_writable(folder: str) -> bool:
    path = Path(folder).absolute()
    existing = next(level for level in (path, *path.parents) if os.path.exists(level))  # False where it may not look
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
