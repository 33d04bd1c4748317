"""Threads of OpenMP that wait as those of the command do, for what measures speed without it."""

import os
import sys

from mycli.cli.main import SPINS


def wait_as_the_command_does() -> None:
    """Start this program anew with the command's environment, which torch's OpenMP reads as it is loaded."""
    if "GOMP_SPINCOUNT" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "GOMP_SPINCOUNT": SPINS})
