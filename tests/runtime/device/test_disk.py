"""Test disk read speed: a rate if there is a file to read, None otherwise."""

from pathlib import Path

import pytest

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
