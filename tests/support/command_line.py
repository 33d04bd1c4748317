"""The command line for tests: inside this process, where torch is imported once for all, or as a process of its own.

Both answer with what a process leaves: exit code, standard output, standard error. Signals, terminals, closed streams
and what is imported at all need a process; the words and the codes of a command do not.
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
from tests.support.paths import ROOT

Completed = subprocess.CompletedProcess[str]
Mycli = Callable[..., Completed]
SECONDS = 120  # after which a process is taken for stuck


def _is_installed() -> bool:
    """Whether this interpreter has an editable install of this checkout, and not of another."""
    records = [one.read_text("direct_url.json") for one in metadata.distributions(name="mycli-llm")]
    return ROOT.as_uri() in [json.loads(record)["url"] for record in records if record]


# What a person types is what tests run: the installed command, without PYTHONPATH, outside of the checkout.
# A second worktree and a GPU machine have nothing installed; there the links show Python the same files.
INSTALLED = _is_installed()
COMMAND = [str(Path(sysconfig.get_path("scripts")) / "mycli")] if INSTALLED else [sys.executable, "-m", "mycli.cli"]


def run_process(arguments: tuple[str, ...], environment: Mapping[str, str], input: str | None = None) -> Completed:
    """`mycli` with `arguments` as a user starts it; standard input is empty where `input` is None."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=tempfile.gettempdir(),
        input=input,
        stdin=subprocess.DEVNULL if input is None else None,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def run_here(arguments: tuple[str, ...], environment: Mapping[str, str], input: str | bytes | None = None) -> Completed:
    """`mycli` with `arguments` in this process: streams and environment are exchanged, signals stay pytest's."""
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
    """For a child: as in a terminal, whatever the test runner inherited in the background or under nohup."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
