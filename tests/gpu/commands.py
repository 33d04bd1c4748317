"""Commands that a user types on a machine with a GPU, and a server with many clients; each must end well."""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.command_line import COMMAND, INSTALLED
from tests.support.paths import ROOT

QUANTIZE = "quantize pico --samples 16 --seq 256 --report quick --bits"
# Lines of one list run one after the other, lists beside each other.
LINES = (
    ("doctor pico --warm --device cuda", "run pico 'Once upon a time' -n 64 -t 0", "bench pico -p 64 -n 32 -r 2 -v"),
    (
        f"{QUANTIZE} 4 -o int4",
        "run int4 'Once upon a time' -n 64 -t 0",
        "run int4 Once -n 64 -t 0.8 --seed 1 --top-p 0.9 --kv int8",
        "bench int4 -p 64 -n 64 -b 1,8 -r 2 -v",
        "eval int4 --ref pico --tokens 4096",
        "estimate int4 --verify --ctx 2k",
    ),
    (f"{QUANTIZE} 3 --hessian model -o int3", "run int3 Once -n 64 -t 0 --kv int4", "doctor int3"),
    (f"{QUANTIZE} 4 --method awq --tune -o awq", "run awq Once -n 64 -t 0 --draft ngram"),
    (
        "run pico 'A story of Leo' -n 48 -t 0 --draft pico-draft",
        "run pico 'How old is Leo?' --schema '{\"type\": \"object\"}' -n 60",
        "run pico Once -n 24 --beams 3",
        "estimate pico --verify",
        "eval pico --kv-sweep --tokens 4096",
    ),
    ("-m tests.benchmarks.soak --seconds 25 --clients 24 --idle 50",),
)


def _typed(line: str, folder: str) -> dict[str, Any]:
    program, line = ([sys.executable], line) if line.startswith("-m ") else (COMMAND, line)
    environment = {**os.environ, "MYCLI_HOME": f"{folder}/home"}
    if not INSTALLED or line.startswith("-m "):
        environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / ".links"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    began = time.monotonic()
    done = subprocess.run(
        [*program, *shlex.split(line)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return {
        "command": line,
        "exit": done.returncode,
        "s": time.monotonic() - began,
        "printed": (done.stdout + done.stderr)[-1500:],
        "ok": done.returncode == 0,
    }


def commands(lists: Sequence[Sequence[str]] = LINES) -> Iterator[dict[str, Any]]:
    """Yield the exit status, the seconds and the end of the output of each command, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(lists)) as pool:
        for rows in pool.map(lambda lines: [_typed(line, folder) for line in lines], lists):
            yield from rows
