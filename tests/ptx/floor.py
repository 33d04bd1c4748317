"""Compile every kernel with the installed Triton, for one compute capability: the check for the oldest supported one.

PYTHONPATH=FOLDER_OF_A_TRITON:.links python -m tests.ptx.floor [90 [6]]

The second number compiles every sixth variant of each kernel, beginning with its first. A kernel that does not compile
or that spills registers is named, and the exit code is 1. `tests.ptx.report` has the instruction counts.
"""

import os
import sys
from concurrent.futures import ProcessPoolExecutor

import triton

from tests.ptx.builds import builds
from tests.ptx.report import spills


def trouble(name: str, capability: int) -> str | None:
    """Return what is wrong with one kernel, None if nothing is."""
    build = next(build for build in builds(capability) if build.name == name)
    try:
        spilled = spills(build, capability)
    except Exception as error:  # noqa: BLE001  (reason: compilers raise all kinds)
        return f"{name}: {type(error).__name__}: {str(error).strip()[-300:]}"
    return f"{name}: {spilled} bytes spilled" if spilled else None


def _main(arguments: list[str]) -> int:
    capability = int(arguments[0]) if arguments else 90
    variants: dict[str, list[str]] = {}
    for build in builds(capability):
        variants.setdefault(build.kernel.__name__, []).append(build.name)
    step = int(arguments[1]) if len(arguments) > 1 else 1
    names = [name for each in variants.values() for name in each[::step]]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = [one for one in pool.map(trouble, names, [capability] * len(names)) if one is not None]
    print(
        "\n".join([*found, f"Triton {triton.__version__}, sm_{capability}: {len(names)} kernels, {len(found)} faults"])
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
