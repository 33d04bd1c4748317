"""Test disk read speed: a rate if there is a file to read, None otherwise."""

import os
from pathlib import Path

import pytest

from mycli.runtime.device import disk
from mycli.runtime.device.disk import read_rate


@pytest.mark.parametrize("size", [1, 1 << 20, (9 << 20) + 5], ids=str)
def test_any_file_has_a_rate(size: int, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    rate = read_rate(file, nbytes=8 << 20)
    assert rate is not None and 0 < rate < 1000


def test_what_cannot_be_read_has_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert read_rate(tmp_path / "empty") is None
    assert read_rate(tmp_path / "missing") is None
    assert read_rate(tmp_path) is None


def test_the_middle_of_a_file_is_read_once_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, int]] = []
    pread, moments = os.pread, iter((7.0, 9.0))

    def recorded(descriptor: int, count: int, offset: int) -> bytes:
        data = pread(descriptor, count, offset)
        reads.append((offset, len(data)))
        return data

    monkeypatch.setattr(os, "pread", recorded)
    monkeypatch.setattr(disk.time, "perf_counter", lambda: next(moments))
    monkeypatch.setattr(disk, "_PART", 4096)
    (tmp_path / "file").write_bytes(bytes(30_000))
    assert read_rate(tmp_path / "file", nbytes=10_000) == pytest.approx(10_000 / 2 / 1e9)
    assert reads == [(10_000, 4096), (14_096, 4096), (18_192, 1808)]
