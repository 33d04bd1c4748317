"""Test atomic file writes, locks between processes and free disk space, as seen by readers and other writers."""

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mycli.runtime.errors import ResourceError, UsageError
from mycli.runtime.utils.files import (
    LockedError,
    disk_errors,
    locked,
    open_input,
    require_space,
    try_lock,
    write_atomic,
)
from tests.support.paths import ROOT

HOLDER = """
import sys
from pathlib import Path
from mycli.runtime.utils.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> "subprocess.Popen[str]":
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".links")}
    command = [sys.executable, "-c", HOLDER, str(path)]
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_modes_are_private_or_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o002)
    try:
        write_atomic(tmp_path / "open", b"a")
        write_atomic(tmp_path / "private", b"b", private=True)
        with locked(tmp_path / "shared"):
            pass
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"open": 0o664, "private": 0o600, "shared": 0o664}


@pytest.mark.parametrize(
    ("options", "flushed"),
    [({}, ["file"]), ({"durable": True}, ["file", "folder"]), ({"flushed": False}, [])],
    ids=["default", "durable", "unflushed"],
)
def test_the_contents_are_flushed_and_the_name_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], flushed: list[str]
) -> None:
    log: list[str] = []

    def flush(descriptor: int) -> None:
        log.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

    monkeypatch.setattr(os, "fsync", flush)
    write_atomic(tmp_path / "f", b"x", **options)
    assert log == flushed


def test_a_failing_write_leaves_the_old_contents_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_atomic(tmp_path / "f", b"before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="No space left"), disk_errors(tmp_path / "f"):
        write_atomic(tmp_path / "f", b"after")
    assert (tmp_path / "f").read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1


def test_a_limit_of_the_size_of_files_is_no_full_disk(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="File too large") as caught, disk_errors(tmp_path / "f"):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    assert "allows larger files" in caught.value.hint and "free" not in caught.value.hint


def test_a_missing_folder_is_another_path_to_choose(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"), disk_errors(tmp_path / "none" / "f"):
        write_atomic(tmp_path / "none" / "f", b"x")


def test_a_lock_tells_its_holder_and_goes_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = holder(path)
    with pytest.raises(LockedError) as caught, locked(path):
        pass
    assert caught.value.holder == str(process.pid)
    process.kill()
    process.communicate()
    with locked(path):
        assert path.read_text() == str(os.getpid())


def test_whoever_waits_hears_for_whom(tmp_path: Path) -> None:
    process, holders, entered = holder(tmp_path / "lock"), list[str](), threading.Event()

    def wait() -> None:
        with locked(tmp_path / "lock", holders.append):
            entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(200):
        if holders:
            break
        time.sleep(0.02)
    assert holders == [str(process.pid)] and not entered.is_set()
    process.communicate("")
    thread.join()
    assert entered.is_set()


def test_a_removed_lock_leaves_nothing_and_still_excludes(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, remove=True), path.open("rb") as file:
        assert not try_lock(file.fileno())
    assert not path.exists()


def test_a_lock_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError), locked(tmp_path / "lock"):
        pass
    assert (tmp_path / "precious").read_text() == "text"


def test_where_there_are_no_locks_only_whoever_would_wait_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with locked(tmp_path / "lock", print):
        pass
    with pytest.raises(OSError, match="No locks"), locked(tmp_path / "lock"):
        pass


def test_space_is_asked_of_the_disk_where_the_folder_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: exact to the byte."""
    paths: list[Path] = []
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: paths.append(path) or usage)
    require_space(tmp_path / "a" / "b", 1000)
    assert paths == [tmp_path]
    with pytest.raises(ResourceError, match="1001 bytes needed, 1000 bytes free") as caught:
        require_space(tmp_path, 1001)
    assert caught.value.hint and not caught.value.code
    with pytest.raises(ResourceError) as caught:
        require_space(tmp_path, 1001, code="cache-full")
    assert caught.value.code == "cache-full" and not caught.value.hint


def test_only_pipes_that_may_be_read_are_waited_for(tmp_path: Path) -> None:
    """Opening a pipe without a writer must not wait where pipes are refused."""
    (tmp_path / "f").write_bytes(b"text")
    for pipes in (False, True):
        with open_input(tmp_path / "f", pipes=pipes) as file:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            assert file.read() == b"text" and bool(flags & os.O_NONBLOCK) != pipes
    with pytest.raises(UsageError, match="a folder"), open_input(tmp_path):
        pass


def test_a_lock_file_that_its_holder_removes_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)

    def end(_: str) -> None:
        path.unlink()
        os.close(holder)

    with locked(path, end, remove=True):
        assert path.read_text() == str(os.getpid())
    assert not path.exists()
