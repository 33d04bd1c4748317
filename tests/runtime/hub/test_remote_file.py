"""Test the disk cache of ranges: what is left of a killed process is dropped, and what vanishes is fetched again."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mycli.runtime.hub import remote_file
from mycli.runtime.hub.remote_file import RangeSpool

FILE: Any = SimpleNamespace(digest="d" * 64, name="model.safetensors")


def test_ranges_of_a_killed_process_count_no_more(tmp_path: Path) -> None:
    """Each kill left ranges that the limit did not count, so a run of many kills needed ever more disk."""
    left = tmp_path / "ranges" / "left"
    left.parent.mkdir()
    left.write_bytes(b"ab")
    hub: Any = None
    RangeSpool(hub, "org/m", "0", left.parent).close()
    assert not left.exists()


def test_a_range_that_vanishes_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process of the same command empties the folder before it finds that the work is taken."""
    fetched = []

    def fetch(hub: object, repo: str, commit: str, name: str, offset: int, view: memoryview) -> None:
        fetched.append(offset)
        view[:] = b"ab"

    monkeypatch.setattr(remote_file, "fetch_range", fetch)
    hub: Any = None
    spool = RangeSpool(hub, "org/m", "0", tmp_path / "ranges")
    spool.limit = 10
    for expected in (1, 1, 2):
        if expected == 2:
            shutil.rmtree(tmp_path / "ranges")
        data = bytearray(2)
        spool.read_into(FILE, memoryview(data), 0)
        assert data == b"ab" and len(fetched) == expected
    spool.close()
