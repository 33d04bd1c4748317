"""Starts Python commands that need torch as forks of a process that has imported it; see `fork_server`.

They are processes of their own, with their own signals, streams, terminal and exit code, but cost a tenth of the
CPU time. Tests of the start itself, of imports, of locales and of memory use `subprocess`.
"""

import ctypes
import inspect
import json
import os
import pty
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pexpect
from ptyprocess import PtyProcess

from tests.support.paths import ROOT

_ADOPT = 36  # PR_SET_CHILD_SUBREAPER: the parent of orphans is this process and not the first


@cache
def _can_adopt() -> bool:
    # Where orphans are not adopted, as outside Linux, commands are started as usual: `Popen` takes a process that it
    # cannot wait for as one that ended with 0.
    return sys.platform == "linux" and bool(ctypes.CDLL(None).prctl(_ADOPT, 0, 0, 0, 0) == 0)


@cache
def _fork_server() -> socket.socket:
    """Start the server on first use; it ends with this process, whose end of the socket closes."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = str(ROOT / "tests" / "support" / "fork_server.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with theirs:
        subprocess.Popen(
            [sys.executable, program, str(theirs.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return control


def _fork(
    command: Sequence[str],
    descriptors: Sequence[int],
    environment: Mapping[str, str] | None,
    folder: os.PathLike[str] | str | None,
    session: bool = False,
    terminal: bool = False,
) -> int:
    """Return the process id of a child of this process that runs `command`."""
    request = {
        "command": list(command),
        "environment": dict(os.environ if environment is None else environment),
        "folder": str(folder or os.getcwd()),
        "session": session or terminal,
        "terminal": terminal,
    }
    control, libc = _fork_server(), ctypes.CDLL(None)
    libc.prctl(_ADOPT, 1, 0, 0, 0)
    try:
        socket.send_fds(control, [json.dumps(request).encode()], list(descriptors))
        number = control.recv(20)
    finally:
        libc.prctl(_ADOPT, 0, 0, 0, 0)
    if not number:
        raise OSError("the fork server started no process")
    return int(number)


class ForkedProcess(subprocess.Popen[Any]):
    """A `subprocess.Popen` whose child is a fork of the server; signals have their defaults."""

    def _execute_child(self, *arguments: Any) -> None:
        if not _can_adopt():
            return super()._execute_child(*arguments)  # type: ignore[misc,no-any-return]
        signature = inspect.signature(super()._execute_child)  # type: ignore[misc]  # where Popen starts the child
        names = signature.bind(*arguments).arguments
        pipes = [names[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [own if pipe == -1 else pipe for own, pipe in enumerate(pipes)]
        self.pid = _fork(names["args"], streams, names["env"], names["cwd"], names["start_new_session"])
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(names[name] for name in ends))  # type: ignore[attr-defined]  # as the original ends


class ForkedTerminal(pexpect.spawn):  # type: ignore[misc]  # it has no stubs
    """A `pexpect.spawn` of a Python command whose child is a fork of the server."""

    def _spawnpty(self, args: list[bytes], **options: Any) -> PtyProcess:
        if not _can_adopt():
            return super()._spawnpty(args, **options)
        ours, theirs = pty.openpty()
        try:
            command = [os.fsdecode(word) for word in args]
            pid = _fork(command, [theirs] * 3, options["env"], options["cwd"], terminal=True)
        finally:
            os.close(theirs)
        process = PtyProcess(pid, ours)
        process.setwinsize(*options["dimensions"])
        return process
