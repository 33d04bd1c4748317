"""Test that a folder appears whole or not at all: full disks, kills, concurrent writers, targets (D1 to D16)."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mycli.cli.remedies import remedy
from mycli.runtime.errors import ExitCode, ResourceError, UsageError
from mycli.runtime.utils.atomic_folder import Staging


def fill(target: Path, text: str, **options: bool) -> None:
    with Staging(target, 10, **options) as staging:
        (staging.folder / "config.json").write_text(text)
        staging.commit()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_appears_only_at_commit(tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"
    with Staging(target, 10) as staging:
        (staging.folder / "f").write_text("x")
        assert not target.exists()
        staging.commit()
        assert (target / "f").read_text() == "x"
    assert names(target.parent) == ["out"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_failure_leaves_nothing(failure: type[BaseException], tmp_path: Path) -> None:
    """D16: the same after Ctrl-C, or the exception raised for a SIGTERM."""
    with pytest.raises(failure), Staging(tmp_path / "out", 10) as staging:
        (staging.folder / "f").write_text("x")
        raise failure
    assert names(tmp_path) == []


def test_leaving_without_commit_leaves_nothing(tmp_path: Path) -> None:
    with Staging(tmp_path / "out", 10):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(umask: int, tmp_path: Path) -> None:
    """D14"""
    old = os.umask(umask)
    try:
        fill(tmp_path / "out", "x")
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask
    assert (tmp_path / "out/config.json").stat().st_mode & 0o777 == 0o666 & ~umask


def test_everything_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: the order of system calls determines what survives a power failure."""
    log: list[str] = []
    flush, rename = os.fsync, Path.rename

    def log_flush(descriptor: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        log.append("flush " + re.sub(r"-\d+-\w+$", "", name))
        flush(descriptor)

    def log_rename(path: Path, target: Path) -> Path:
        log.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", log_flush)
    monkeypatch.setattr(Path, "rename", log_rename)
    with Staging(tmp_path / "out", 10) as staging:
        (staging.folder / "a").write_text("x")
        (staging.folder / "b").write_text("y")
        staging.commit()
    assert sorted(log[:2]) == ["flush a", "flush b"]
    assert log[2:] == ["flush .out.partial", "rename", f"flush {tmp_path.name}"]


# Existing files at the target


def test_existing_target(tmp_path: Path) -> None:
    """D5"""
    fill(tmp_path / "out", "old")
    with pytest.raises(UsageError, match="exists already") as caught:
        fill(tmp_path / "out", "new")
    assert "--overwrite" in remedy(caught.value)
    assert (tmp_path / "out/config.json").read_text() == "old"
    fill(tmp_path / "out", "new", overwrite=True)
    assert (tmp_path / "out/config.json").read_text() == "new"
    assert names(tmp_path) == ["out"]


def _file(path: Path) -> None:
    path.write_text("keep")


def _home(path: Path) -> None:
    (path / "Documents").mkdir(parents=True)
    (path / "config.json").touch()


def _other(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").touch()


def _link(path: Path) -> None:
    _other(path.with_name("real"))
    path.symlink_to("real")


@pytest.mark.parametrize(
    "make", [_file, _home, _other, _link], ids=["D5-file", "D5-subfolders", "D5-no-model", "D5-link"]
)
def test_overwrite_replaces_model_folders_only(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "out")
    before = sorted(map(str, tmp_path.rglob("*")))
    with pytest.raises(UsageError):
        fill(tmp_path / "out", "new", overwrite=True)
    assert sorted(map(str, tmp_path.rglob("*"))) == before


PLACES = {
    "D5-same": ".",
    "D5-inside": "out",
    "D5-deep-inside": "a/b/out",
    "D5-around": "..",
    "D5-through-link": "../link/x",
}


@pytest.mark.parametrize("case", PLACES)
def test_never_over_the_input(case: str, tmp_path: Path) -> None:
    source = tmp_path / "models" / "in"
    source.mkdir(parents=True)
    (source / "config.json").touch()
    (source.parent / "link").symlink_to("in")
    before = sorted(map(str, tmp_path.rglob("*")))
    with (
        pytest.raises(UsageError, match="overlaps the input"),
        Staging(source / PLACES[case], 1, overwrite=True, source=source),
    ):
        pass
    assert sorted(map(str, tmp_path.rglob("*"))) == before, "the input was touched"


def test_beside_the_input_is_fine(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with Staging(tmp_path / "in-int4", 1, source=tmp_path / "in") as staging:
        staging.commit()
    assert names(tmp_path) == ["in", "in-int4"]


def test_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: exact to the byte."""
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with Staging(tmp_path / "out", 1000):
        pass
    with (
        pytest.raises(ResourceError, match="1001 bytes needed, 1000 bytes free") as caught,
        Staging(tmp_path / "out", 1001),
    ):
        pass
    assert caught.value.hint
    assert caught.value.exit_code == ExitCode.RESOURCES
    assert names(tmp_path) == []


def test_disk_fills_at_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D2: network file systems report it only at fsync; the old output remains."""
    fill(tmp_path / "out", "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="No space left"):
        fill(tmp_path / "out", "new", overwrite=True)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out/config.json").read_text() == "old"


def test_failed_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "out", "old")
    rename = Path.rename

    def fail_second(path: Path, target: Path) -> Path:
        if ".partial-" in path.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_second)
    with pytest.raises(ResourceError, match="Input/output error"):
        fill(tmp_path / "out", "new", overwrite=True)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out/config.json").read_text() == "old"


def test_target_created_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="created meanwhile"), Staging(tmp_path / "out", 1) as staging:
        (tmp_path / "out").mkdir()
        staging.commit()
    assert names(tmp_path) == ["out"]


PATHS = {
    "D13-too-long": "x" * 300,
    "D13-nul": "a\0b",
    "D13-below-a-file": "file/out",
    "D13-root": "/",
    "D13-proc": "/proc/out",
}


@pytest.mark.parametrize("case", PATHS)
def test_impossible_path(case: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError) as caught, Staging(tmp_path / PATHS[case], 1, overwrite=True):
        pass
    assert caught.value.hint


@pytest.mark.parametrize(
    "code", [errno.EACCES, errno.EROFS, errno.EPERM], ids=lambda code: f"D13-{errno.errorcode[code]}"
)
def test_folder_that_cannot_be_written(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is patched in, since root may write anywhere."""

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UsageError, match=os.strerror(code)), Staging(tmp_path / "out", 1):
        pass
    assert names(tmp_path) == []


def test_names_that_are_no_utf8(tmp_path: Path) -> None:
    """D13"""
    target = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    fill(target, "x")
    assert (target / "config.json").read_text() == "x"


def test_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D13: the shell passes --out=~/model unexpanded."""
    monkeypatch.setenv("HOME", str(tmp_path))
    fill(Path("~/out"), "x")
    assert names(tmp_path) == ["out"]


# Concurrent and killed writers

HOLD = """
import sys, time, pathlib
from mycli.runtime.utils.atomic_folder import Staging
with Staging(pathlib.Path(sys.argv[1]), 10) as staging:
    (staging.folder / "half").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_second_writer_fails_at_once(holder: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """D7: it does not disturb the first, whose unfinished folder is not treated as a leftover."""
    with pytest.raises(UsageError, match=f"process {holder.pid} is writing it"):
        fill(tmp_path / "out", "x")
    assert [name for name in names(tmp_path) if ".partial-" in name]
    fill(tmp_path / "other", "x")


def test_second_writer_in_one_process(tmp_path: Path) -> None:
    with Staging(tmp_path / "out", 1) as first, pytest.raises(UsageError, match="is writing it"):
        fill(tmp_path / "out", "x")
    assert not first.folder.exists()
    fill(tmp_path / "out", "x")


def test_kill_leaves_what_the_next_run_removes(holder: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """D3, D8: the target's name does not exist, and the lock is released with its process."""
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert not (tmp_path / "out").exists()
    left = [name for name in names(tmp_path) if ".partial-" in name]
    assert len(left) == 1 and f"-{holder.pid}-" in left[0]
    with Staging(tmp_path / "out", 1) as staging:
        assert not (tmp_path / left[0]).exists()
        staging.commit()
    assert names(tmp_path) == ["out"]


def test_interrupted_process_cleans_up(holder: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """D16"""
    holder.send_signal(signal.SIGINT)
    holder.wait()
    assert names(tmp_path) == []


def test_only_own_leftovers_are_removed(tmp_path: Path) -> None:
    """The files of another target whose name has the same prefix, its lock and unfinished folder, remain."""
    run = "partial-1-0123456789ab"
    others = [".out.partial-x.lock", f".out.{run}.{run}", f".out2.{run}"]
    for name in [*others, f".out.{run}"]:
        (tmp_path / name).mkdir()
    fill(tmp_path / "out", "x")
    assert names(tmp_path) == sorted([*others, "out"])


@pytest.mark.parametrize("renamed", [False, True], ids=["between-renames", "after-renames"])
def test_kill_while_replacing(renamed: bool, tmp_path: Path) -> None:
    """D3: a folder moved aside is restored if its replacement is missing, and removed otherwise."""
    if renamed:
        fill(tmp_path / "out", "new")
    fill(tmp_path / ".out.replaced-1-0123456789ab", "old")
    with pytest.raises(UsageError, match="exists already"):
        fill(tmp_path / "out", "newer")
    with Staging(tmp_path / "out", 1, overwrite=True):
        pass
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out/config.json").read_text() == ("new" if renamed else "old")


def test_many_writers_one_winner(tmp_path: Path) -> None:
    """D7: whichever process wins the race, exactly one folder appears, and its lock is removed."""
    code = (
        "import sys, pathlib, mycli.runtime.utils.atomic_folder as s, mycli.runtime.errors as e\n"
        "try:\n"
        "    with s.Staging(pathlib.Path(sys.argv[1]), 1) as staging:\n"
        "        staging.commit()\n"
        "except e.UsageError: sys.exit(2)\n"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")]) for _ in range(6)]
    assert sorted(run.wait() for run in runs) == [0, 2, 2, 2, 2, 2]
    assert names(tmp_path) == ["out"]
