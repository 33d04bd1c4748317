"""Test where a download resumes: after the bytes in the file, and from the start if they are too many."""

import hashlib
from pathlib import Path

import pytest

from mycli.runtime.hub.partial_file import PartialFile
from mycli.runtime.hub.store import HubFile

DATA = bytes(range(100))
FILE = HubFile("a.bin", len(DATA), hashlib.sha256(DATA).hexdigest())


@pytest.mark.parametrize(("stored", "done"), [(0, 0), (40, 40), (100, 100), (101, 0)])
def test_a_download_resumes_after_the_bytes_that_are_there(stored: int, done: int, tmp_path: Path) -> None:
    path = tmp_path / "a.bin.partial"
    path.write_bytes((DATA + b"x")[:stored])
    with PartialFile(path, FILE, lambda _: None) as partial:
        assert partial.done == done
    assert path.stat().st_size == stored


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(DATA)
    (tmp_path / "a.bin.partial").symlink_to(target)
    with pytest.raises(OSError), PartialFile(tmp_path / "a.bin.partial", FILE, lambda _: None):
        pass
    assert target.read_bytes() == DATA
