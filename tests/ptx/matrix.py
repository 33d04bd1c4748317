"""Run all that is shown without a GPU for every Triton and compute capability: kernels, whole passes, races, memory.

PYTHONPATH=.links python -m tests.ptx.matrix FOLDER [--triton FOLDER_OF_A_TRITON].. [--part PART].. [80 90 120]

Besides the installed Triton, those in the folders are run. Each part is a process of its own, whose output is stored in
FOLDER; parts that have passed are not run again, so a run can be interrupted. All parts take hours of processor time.
`kernels`, `passes`, `layers` and `families` also write docs/results/emulated.md.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

CAPABILITIES = (80, 90, 120)
PAGE = ROOT / "docs" / "results" / "emulated.md"
# The module of each part and its arguments.
PARTS: dict[str, tuple[str, ...]] = {
    "compiled": ("tests.ptx.floor", "{capability}"),
    "memory": ("tests.ptx.memory_counts", "{cache}", "{capability}"),
    "races": ("tests.ptx.race_runs", "{cache}", "{capability}"),
    "kernels": ("tests.ptx.suite", "{page}", "{capability}", "-k", "not fused"),
    "passes": ("tests.ptx.suite", "{page}", "{capability}", "-k", "a_fused_pass"),
    "layers": ("tests.ptx.suite", "{page}", "{capability}", "-k", "a_fused_layer"),
    "families": ("tests.ptx.suite", "{page}", "{capability}", "-k", "a_fused_family"),
}


@dataclass(frozen=True)
class Piece:
    """A part for one Triton and one capability. path: PYTHONPATH, where this Triton comes first."""

    part: str
    version: str
    path: str
    capability: int

    def __str__(self) -> str:
        return f"{self.version}-sm{self.capability}-{self.part}"

    def command(self, folder: Path, page: Path = PAGE) -> list[str]:
        """Return the command; what it compiles is kept in `folder`."""
        given = {"capability": self.capability, "cache": folder / "compiled", "page": page}
        module, *arguments = (text.format(**given) for text in PARTS[self.part])
        return [sys.executable, "-m", module, *arguments]


def version(path: str) -> str:
    """Return the version of Triton that a process with this PYTHONPATH imports."""
    command = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def pieces(tritons: Iterable[str], parts: Iterable[str], capabilities: Iterable[int]) -> Iterator[Piece]:
    """Yield the pieces, the installed Triton first and the slowest parts last."""
    paths = [".links", *(f"{folder}:.links" for folder in tritons)]
    versions = [version(path) for path in paths]
    for part in parts:
        for path, name in zip(paths, versions, strict=True):
            for capability in capabilities:
                yield Piece(part, name, path, capability)


def run(piece: Piece, folder: Path) -> bool:
    """Run a piece unless it has passed before; return whether it passes."""
    stored = folder / f"{piece}.txt"
    if stored.exists():
        return True
    folder.mkdir(parents=True, exist_ok=True)
    failed = stored.with_suffix(".failed")
    environment = {**os.environ, "PYTHONPATH": piece.path, "TRITON_CACHE_DIR": str(folder / "triton")}
    with failed.open("w", encoding="utf-8") as output:
        done = subprocess.run(piece.command(folder), cwd=ROOT, env=environment, stdout=output, stderr=output)
    if not done.returncode:
        failed.rename(stored)
    return not done.returncode


def _main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ptx.matrix")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--triton", action="append", default=[])
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("capabilities", nargs="*", type=int)
    given = parser.parse_intermixed_args(arguments)  # options may stand before the capabilities
    good = True
    for piece in pieces(given.triton, given.part or PARTS, given.capabilities or CAPABILITIES):
        passes = run(piece, given.folder.resolve())
        print(f"{piece}: {'passed' if passes else 'FAILED'}", flush=True)
        good = good and passes
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
