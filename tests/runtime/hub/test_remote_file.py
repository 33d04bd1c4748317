"""Test the disk cache of ranges: files of a killed process are deleted, and missing ones are fetched again."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mycli.runtime.hub import remote_file
from mycli.runtime.hub.remote_file import RangeSpool

FILE: Any = SimpleNamespace(digest="d" * 64, name="model.safetensors")


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the offsets of the ranges that were fetched; all contain ab."""
    offsets = list[int]()

    def fetch(hub: object, repo: str, commit: str, name: str, offset: int, view: memoryview) -> None:
        offsets.append(offset)
        view[:] = b"ab"

    monkeypatch.setattr(remote_file, "fetch_range", fetch)
    return offsets


def spool(folder: Path, limit: int = 10) -> RangeSpool:
    hub: Any = None
    made = RangeSpool(hub, "org/m", "0", folder)
    made.limit = limit
    return made


def read(spool: RangeSpool, offset: int = 0) -> bytes:
    data = bytearray(2)
    spool.read_into(FILE, memoryview(data), offset)
    return bytes(data)


def test_ranges_of_a_killed_process_count_no_more(tmp_path: Path, fetched: list[int]) -> None:
    """Each kill left ranges that the limit did not count, so a run of many kills needed ever more disk."""
    left = tmp_path / "ranges" / "left"
    left.parent.mkdir()
    left.write_bytes(b"ab")
    ranges = spool(left.parent, limit=0)
    assert read(ranges) == b"ab"
    assert left.exists()  # a process that only plans deletes nothing: another one may be at work
    ranges.limit = 10
    for offset in (0, 2, 0, 2):
        assert read(ranges, offset) == b"ab"
    assert not left.exists() and fetched == [0, 0, 2]
    ranges.close()


def test_a_range_that_vanishes_is_fetched_again(tmp_path: Path, fetched: list[int]) -> None:
    ranges = spool(tmp_path / "ranges")
    for expected in (1, 1, 2):
        if expected == 2:
            shutil.rmtree(tmp_path / "ranges")
        assert read(ranges) == b"ab" and len(fetched) == expected
    ranges.close()
