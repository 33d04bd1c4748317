"""Test data-sheet bandwidth by device name, and stored measurements."""

from pathlib import Path

import pytest

from mycli.runtime.device.bandwidth import BANDWIDTH_FILE, datasheet, record_bandwidth, recorded_bandwidth


@pytest.mark.parametrize(
    "name, expected",
    [
        ("NVIDIA H200", 4800),
        ("NVIDIA GeForce RTX 4090", 1008),
        ("Tesla T4", 320),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A1000", None),
    ],
)
def test_bandwidth_by_exact_name(name: str, expected: float | None) -> None:
    assert datasheet(name) == expected


def test_a_measurement_is_remembered_beside_others(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    assert recorded_bandwidth(folder, "cpu") is None
    record_bandwidth(folder, "cpu", 36.204)
    record_bandwidth(folder, "NVIDIA H200", 4300)
    assert record_bandwidth(folder, "cpu", 37) == 37
    assert record_bandwidth(folder, "cpu", 18) == 37, "other work took the rest"
    assert (recorded_bandwidth(folder, "cpu"), recorded_bandwidth(folder, "NVIDIA H200")) == (37, 4300)
    assert recorded_bandwidth(folder, "another") is None
    assert (folder / BANDWIDTH_FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == [BANDWIDTH_FILE]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cpu": "fast"}', '{"cpu": -1}', '{"cpu": NaN}'])
def test_a_damaged_note_is_no_note(tmp_path: Path, text: str) -> None:
    (tmp_path / BANDWIDTH_FILE).write_text(text)
    assert recorded_bandwidth(tmp_path, "cpu") is None
    record_bandwidth(tmp_path, "cpu", 20)
    assert recorded_bandwidth(tmp_path, "cpu") == 20
