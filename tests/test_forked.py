"""Test that a command which cannot be forked fails at once, and is started as usual where no orphan is adopted."""

import socket
import subprocess
import sys

import pytest

from tests.support import forked
from tests.support.forked import ForkedProcess, ForkedTerminal
from tests.support.paths import ROOT

FAILING = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
import fork_server

fork, server = os.fork, os.getpid()
os.fork = lambda: fork() if os.getpid() == server else os._exit(1)
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
fork_server.start_child([], theirs)
print(ours.recv(20))
"""


def test_a_process_that_cannot_be_forked_is_no_wait_without_end() -> None:
    command = [sys.executable, "-c", FAILING, str(ROOT / "tests" / "support")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "b''\n"), done.stderr


def test_a_server_that_starts_no_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(forked, "_fork_server", lambda: ours)
    with ours, theirs:
        theirs.send(b"")
        with pytest.raises(OSError, match="started no process"):
            ForkedProcess([sys.executable, "-m", "this"])


def test_commands_are_started_as_usual_where_orphans_are_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_can_adopt", lambda: False)
    monkeypatch.setattr(forked, "_fork_server", lambda: pytest.fail("it cannot be used"))
    command = [sys.executable, "-c", "import sys; print(sys.stdout.isatty()); sys.exit(3)"]
    with ForkedProcess(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0] == "False\n"
    assert process.returncode == 3
    terminal = ForkedTerminal(command[0], command[1:], encoding="utf-8", timeout=30)
    terminal.expect_exact("True")
    assert terminal.wait() == 3


def test_a_fork_ends_with_its_own_exit_code() -> None:
    """`Popen` takes a process that is not its child as one that ended with 0."""
    with ForkedProcess([sys.executable, "-m", "mycli.no_such_module"], stderr=subprocess.PIPE, text=True) as process:
        assert "no_such_module" in process.communicate()[1]
    assert process.returncode == 1
