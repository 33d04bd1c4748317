"""Makes OpenMP threads wait as in the command, for measuring speed without it."""

import os
import sys

from mycli.cli.main import SPINS


def wait_as_the_command_does() -> None:
    """Restart this program with the command's environment, which torch's OpenMP reads when it is loaded."""
    if "GOMP_SPINCOUNT" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "GOMP_SPINCOUNT": SPINS})
