"""Test reading of ranges over a network that drops connections, and the disk cache of ranges within its limit."""

import shutil
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mycli.runtime.errors import GateError, ModelError
from mycli.runtime.hub import remote_file
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.remote_file import RangeSpool, RemoteFile, fetch_range
from tests.support.hub_server import Fault, HubServer
from tests.support.pulling import QUICK, REPO

FILE: Any = SimpleNamespace(digest="d" * 64, name="model.safetensors")
DATA = bytes(range(256)) * 64


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


@pytest.mark.parametrize("damage", ["vanishes", "is-cut"])
def test_a_stored_range_that_is_damaged_is_fetched_again(damage: str, tmp_path: Path, fetched: list[int]) -> None:
    ranges = spool(tmp_path / "ranges")
    for expected in (1, 1, 2):
        if expected == 2 and damage == "vanishes":
            shutil.rmtree(tmp_path / "ranges")
        elif expected == 2:
            [path] = (tmp_path / "ranges").iterdir()
            path.write_bytes(b"a")
        assert read(ranges) == b"ab" and len(fetched) == expected
    ranges.close()


def test_the_range_whose_last_read_is_oldest_makes_room(tmp_path: Path, fetched: list[int]) -> None:
    ranges = spool(tmp_path / "ranges", limit=4)
    for offset in (0, 2, 0, 4, 0, 2):
        assert read(ranges, offset) == b"ab"
    assert fetched == [0, 2, 4, 2]
    assert sum(path.stat().st_size for path in (tmp_path / "ranges").iterdir()) == 4
    ranges.close()


@pytest.mark.parametrize(("limit", "times"), [(1, 2), (2, 1)])
def test_a_range_as_large_as_the_limit_is_stored(limit: int, times: int, tmp_path: Path, fetched: list[int]) -> None:
    ranges = spool(tmp_path / "ranges", limit)
    assert read(ranges) == read(ranges) == b"ab" and len(fetched) == times
    assert (tmp_path / "ranges").exists() is (limit == 2)
    ranges.close()


def test_ranges_are_fetched_ahead_once_and_up_to_half_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, may_arrive = list[tuple[int, bool]](), threading.Event()

    def fetch(hub: object, repo: str, commit: str, name: str, offset: int, view: memoryview) -> None:
        fetched.append((offset, threading.current_thread() is not threading.main_thread()))
        may_arrive.wait()
        view[:] = b"ab"

    monkeypatch.setattr(remote_file, "fetch_range", fetch)
    ranges = spool(tmp_path / "ranges", limit=8)
    for offset in (0, 0, 2, 4):  # the last would be more than half
        ranges.prefetch(FILE, offset, 2)
    may_arrive.set()
    assert read(ranges, 0) == read(ranges, 2) == b"ab"
    for offset in (0, 6):  # the first is stored
        ranges.prefetch(FILE, offset, 2)
    assert read(ranges, 6) == b"ab" and fetched == [(0, True), (2, True), (6, True)]
    ranges.close()


def test_a_cancelled_read_and_one_of_no_bytes_fetch_nothing(tmp_path: Path, fetched: list[int]) -> None:
    ranges, cancelled, data = spool(tmp_path / "ranges"), threading.Event(), bytearray(2)
    file = RemoteFile(FILE.name, 2, FILE.digest, ranges)
    file.read_into(memoryview(b""), 0)
    file.prefetch(0, 0)
    file.read_into(memoryview(data), 0, cancelled)
    cancelled.set()
    with pytest.raises(CancelledError):
        file.read_into(memoryview(bytearray(2)), 2, cancelled)
    assert data == b"ab" and fetched == [0]
    ranges.close()


@pytest.mark.parametrize(
    ("fault", "requests"),
    [
        (Fault(), ["bytes=100-9099"]),
        (Fault(drop_after=3000), ["bytes=100-9099", "bytes=3100-9099"]),
        (Fault(shifted=7), ["bytes=100-9099", "bytes=100-9099"]),
        (Fault(206, {"Content-Range": "bytes 100-9199/16384"}, DATA[100:9200]), ["bytes=100-9099"]),
    ],
    ids=["whole", "dropped", "another-part", "too-long"],
)
def test_a_range_is_continued_where_it_broke_off(fault: Fault, requests: list[str], server: HubServer) -> None:
    commit = server.add(REPO, {"w.bin": DATA})
    server.fail("storage:", fault)
    data = bytearray(9000)
    with Hub(server.address(), None, lambda note: None, QUICK) as hub:
        fetch_range(hub, REPO, commit, "w.bin", 100, memoryview(data))
    assert data == DATA[100:9100]
    assert [request.headers.get("Range") for request in server.requests("storage:")] == requests


def test_a_server_without_ranges_is_refused(server: HubServer) -> None:
    commit = server.add(REPO, {"w.bin": DATA})
    server.fail("storage:", Fault(ignore_range=True))
    with (
        Hub(server.address(), None, print, QUICK) as hub,
        pytest.raises(ModelError, match="does not send parts of w.bin") as refused,
    ):
        fetch_range(hub, REPO, commit, "w.bin", 0, memoryview(bytearray(10)))
    assert refused.value.code == "pull-then-quantize"


def test_a_range_that_the_server_changes_during_a_run_is_refused(server: HubServer, tmp_path: Path) -> None:
    commit = server.add(REPO, {FILE.name: DATA})
    with Hub(server.address(), None, print, QUICK) as hub:
        ranges = RangeSpool(hub, REPO, commit, tmp_path / "ranges")
        assert read(ranges, 4) == read(ranges, 4) == DATA[4:6]
        server.fail("storage:", Fault(altered=True))
        with pytest.raises(GateError, match="two different contents"):
            read(ranges, 4)
        ranges.close()
