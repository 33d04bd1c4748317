"""Runs the command line for tests: inside this process, which imports torch only once, or in a separate process.

Both return the exit code, standard output and standard error. Tests of signals, terminals, closed streams and imports
need a process; tests of messages and exit codes do not.
"""

import io
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from unittest import mock

from mycli.cli import command
from mycli.cli.main import main
from tests.support.forked import ForkedProcess
from tests.support.paths import ROOT

Completed = subprocess.CompletedProcess[str]
Mycli = Callable[..., Completed]
SECONDS = 120  # after which a process counts as hung


def _is_installed() -> bool:
    records = [one.read_text("direct_url.json") for one in metadata.distributions(name="mycli-llm")]
    return ROOT.as_uri() in [json.loads(record)["url"] for record in records if record]


# Tests run what users run: the installed command, without PYTHONPATH, outside of the checkout. A second worktree and a
# GPU machine have no installation; there the links give Python the same files.
INSTALLED = _is_installed()
COMMAND = [str(Path(sysconfig.get_path("scripts")) / "mycli")] if INSTALLED else [sys.executable, "-m", "mycli.cli"]


def run_process(arguments: tuple[str, ...], environment: Mapping[str, str], input: str | None = None) -> Completed:
    """Run `mycli` with `arguments` in a separate process; standard input is empty if `input` is None."""
    with ForkedProcess(
        [*COMMAND, *arguments],
        cwd=tempfile.gettempdir(),
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(input, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return Completed(arguments, process.returncode, out, err)


def run_here(arguments: tuple[str, ...], environment: Mapping[str, str], input: str | bytes | None = None) -> Completed:
    """Run `mycli` with `arguments` in this process with replaced streams and environment, keeping pytest's signals."""
    typed = input.encode() if isinstance(input, str) else input or b""
    stdin, stdout, stderr = (io.TextIOWrapper(io.BytesIO(data), encoding="utf-8") for data in (typed, b"", b""))
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.multiple(sys, stdin=stdin, stdout=stdout, stderr=stderr),
        mock.patch.object(command, "_handle_signals", lambda: None),
    ):
        try:
            main(list(arguments))
        except SystemExit as stop:
            code = int(stop.code or 0)
    said = []
    for stream in (stdout, stderr):
        stream.flush()
        said.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]  # a BytesIO
    return Completed(arguments, code, *said)


def default_signals() -> None:
    """Restore default signal handlers in a child, which pytest may have lost in the background or under nohup."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
