"""Test special files, links, and files that change while being read (A23 to A25)."""

import os
import socket
from pathlib import Path

import pytest

from mycli.runtime.checkpoint.stable_file import CHUNK, RegularFile
from mycli.runtime.errors import ModelError


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


IRREGULAR = {
    "A22-missing": lambda path: None,
    "A23-dangling-link": lambda path: path.symlink_to("nowhere"),
    "A24-link-loop": lambda path: path.symlink_to(path.name),
    "A24-fifo": _fifo,
    "A24-link-to-fifo": lambda path: (_fifo(path.with_name("fifo")), path.symlink_to("fifo")),
    "A24-socket": _socket,
    "A24-device": lambda path: path.symlink_to("/dev/zero"),
    "A24-directory": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("case", IRREGULAR)
def test_irregular_rejected(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    IRREGULAR[case](Path("f"))
    with pytest.raises(ModelError, match=r"^f: "):
        RegularFile.find(Path("f"))


def test_reads_ranges(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    file = RegularFile.find(tmp_path / "f")
    assert (file.read(4), file.read(4, 3), file.read(100, 8), file.read(1, 50)) == (b"0123", b"3456", b"89", b"")
    buffer = bytearray(b"........")
    file.read_into(memoryview(buffer)[2:5], 7)
    assert buffer == b"..789..."


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    file = RegularFile.find(tmp_path / "f")
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][:3]], offset))
    assert file.read(10) == b"0123456789"


def test_chunks_cover_everything_once(tmp_path: Path) -> None:
    data = os.urandom(CHUNK + 5)
    (tmp_path / "f").write_bytes(b"skip" + data + b"skip")
    pieces = [bytes(piece) for piece in RegularFile.find(tmp_path / "f").chunks(4, len(data))]
    assert [len(piece) for piece in pieces] == [CHUNK, 5]
    assert b"".join(pieces) == data


def _replace(path: Path) -> None:
    path.with_name("new").write_bytes(path.read_bytes())
    os.utime(path.with_name("new"), ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    path.with_name("new").replace(path)


CHANGES = {
    "A25-replaced": _replace,
    "A25-truncated": lambda path: os.truncate(path, 4),
    "A25-grown": lambda path: os.truncate(path, 40),
    "A25-rewritten": lambda path: (path.write_bytes(b"x" * 10), os.utime(path, ns=(0, 0))),
    "A25-removed": lambda path: path.unlink(),
    "A25-became-fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "A25-became-link": lambda path: (path.rename(path.with_name("g")), path.symlink_to("g")),
}


@pytest.mark.parametrize("case", CHANGES)
def test_change_before_reading_is_noticed(case: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    file = RegularFile.find(path)
    CHANGES[case](path)
    with pytest.raises(ModelError, match=r"^f: "):
        file.read(2)


@pytest.mark.parametrize("case", ["A25-truncated", "A25-grown", "A25-rewritten"])
def test_change_while_reading_is_noticed(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    file = RegularFile.find(path)
    real = os.preadv

    def change_first(descriptor: int, views: list[memoryview], offset: int) -> int:
        CHANGES[case](path)
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", change_first)
    with pytest.raises(ModelError, match="truncated while|changed while"):
        file.read(10)


def test_no_descriptor_is_leaked(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    file = RegularFile.find(tmp_path / "f")
    before = len(os.listdir("/proc/self/fd"))
    file.read(3)
    next(file.chunks(0, 10))
    os.truncate(tmp_path / "f", 1)
    with pytest.raises(ModelError):
        file.read(3)
    assert len(os.listdir("/proc/self/fd")) == before
