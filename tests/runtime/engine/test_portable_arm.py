"""Test that whole models have the same logits and replies on ARM, in the emulator: $ARM_PYTHON is its Python.

`python -m tests.support.arm_python FOLDER` makes one; a first run takes some ten minutes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.engine.test_portable_bits import MODELS
from tests.support.native_parts import need_native_code
from tests.support.paths import PICO, ROOT
from tests.support.portable_models import write_family

ARM = os.environ.get("ARM_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not ARM, reason="no $ARM_PYTHON: tests.support.arm_python makes it")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / ".links"), "OMP_NUM_THREADS": "1"}


def both(*words: str) -> tuple[str, str]:
    """Return what a program prints here and on ARM."""
    need_native_code()
    here, arm = (
        subprocess.run([python, "-m", *words], env=ENVIRONMENT, cwd=ROOT, check=True, capture_output=True, text=True)
        for python in (sys.executable, ARM)
    )
    return here.stdout, arm.stdout


def test_logits_are_those_of_this_machine(tmp_path: Path) -> None:
    paths = [str(write_family(tmp_path / case, case)) for case in MODELS]
    words = ("tests.benchmarks.logits_hash", *paths, "--portable-bits", "--sequences", "1", "--replies", "5")
    here, arm = both(*words)
    assert here.count("sha256") == len(MODELS) and arm == here


def test_receipts_of_this_machine_are_replayed(tmp_path: Path) -> None:
    program = "tests.benchmarks.portable_receipts"
    write = (program, "write", str(tmp_path), str(PICO), "--tokens", "500")
    subprocess.run([sys.executable, "-m", *write], env=ENVIRONMENT, cwd=ROOT, check=True)
    here, arm = both(program, "replay", str(tmp_path))
    assert arm.startswith("500 tokens the same on dotprod, 0 replies differ")
    assert arm.partition(" on ")[0] == here.partition(" on ")[0]
