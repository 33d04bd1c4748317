"""Builds the wheel that needs no compiler: `python -m tests.support.platform_wheel FOLDER`, which is `make wheel`.

One library for each set of instructions is compiled on this machine, whichever it is, and looked into: none may want a
newer C library than the platform of the wheel's name promises, nor an OpenMP library by name.
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

GLIBC = (2, 28)  # as torch's own wheels
PLATFORM = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_x86_64"
# Symbols of no library's name that torch's OpenMP library answers, and those that need no answer.
UNNAMED = re.compile(r"GOMP_\w+|omp_\w+|_ITM_\w+|__gmon_start__")
WANTED = re.compile(r"lib(c|m|stdc\+\+|gcc_s)\.so\.\d+")


def complaints(headers: str) -> list[str]:
    """What keeps a library from machines that `PLATFORM` means; of what `objdump` shows."""
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
    """What a library wants of others, as objdump shows it."""
    show = ["objdump", "--private-headers", "--dynamic-syms", str(library)]
    return subprocess.run(show, capture_output=True, text=True, check=True).stdout


def build(folder: Path, names: Iterable[str] = tuple(isa.portable_flags())) -> Path:
    """The wheel in `folder`, with a library for each of `names`. Raises SystemExit where a library will not travel."""
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
