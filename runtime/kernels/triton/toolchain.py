"""Finds out why Triton cannot launch kernels on a machine: it compiles a launcher in C when a kernel first runs."""

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
    return None if (include / "Python.h").exists() else Declined("no-python-headers", {"folder": str(include)})
