"""Builds the wheel that needs no compiler: `python -m tests.support.platform_wheel FOLDER`, or `make wheel`.

Compiles one library for each instruction set, whatever this machine supports, and inspects it: none may need a newer C
library than the wheel's platform tag promises, nor an OpenMP library by name.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from mycli.runtime.kernels.cpu.library import isa, prebuilt
from tests.support.paths import ROOT

GLIBC = (2, 28)  # as in torch's wheels
PLATFORM = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_x86_64"
# Unversioned symbols that torch's OpenMP library provides, and those that may stay undefined.
UNNAMED = re.compile(r"GOMP_\w+|omp_\w+|_ITM_\w+|__gmon_start__")
WANTED = re.compile(r"lib(c|m|stdc\+\+|gcc_s)\.so\.\d+")


def complaints(headers: str) -> list[str]:
    """Return the reasons why a library would not load on the `PLATFORM`; `headers`: output of `objdump`."""
    wanted = [one for one in re.findall(r"NEEDED +(\S+)", headers) if not WANTED.fullmatch(one)]
    found = [f"wants {one}" for one in wanted]
    for line in headers.splitlines():
        symbol = re.search(r"\*UND\*\s+[0-9a-f]+\s+(?:\((\w+?)_([\d.]+)\)|Base)?\s*(\S+)$", line)
        source, version, name = symbol.groups() if symbol else ("", "", "")
        if source is None and not UNNAMED.fullmatch(name):
            found.append(f"{name} is in no library")
        if source == "GLIBC" and tuple(map(int, version.split("."))) > GLIBC:
            found.append(f"{name} is of GLIBC {version}")
    return found


def headers(library: Path) -> str:
    show = ["objdump", "--private-headers", "--dynamic-syms", str(library)]
    return subprocess.run(show, capture_output=True, text=True, check=True).stdout


def build(folder: Path, names: Iterable[str] = tuple(isa.portable_flags())) -> Path:
    """Build the wheel in `folder`, with a library for each of `names`. Raises SystemExit if one is not portable."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as work:
        source = Path(work) / "source"
        for part in ("cli", "runtime", "quant"):
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
        (source / "docs").mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE", "docs/mycli.1"):
            shutil.copy(ROOT / name, source / name)
        shutil.copy(ROOT / ".ci" / "wheel_setup.py", source / "setup.py")
        for name in names:
            library = prebuilt.compile_portable(name, source / "runtime" / "kernels" / "cpu" / "prebuilt")
            if wrong := complaints(headers(library)):
                raise SystemExit(f"{library.name}: {'; '.join(wrong)}")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--disable-pip-version-check",
            "--no-index",
            "--no-deps",
        ]
        options = ["--no-build-isolation", f"--config-settings=--build-option=--plat-name={PLATFORM}"]
        subprocess.run([*pip, *options, "--wheel-dir", str(Path(work) / "made"), str(source)], check=True)
        (made,) = (Path(work) / "made").iterdir()
        return Path(shutil.copy(made, folder))


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
