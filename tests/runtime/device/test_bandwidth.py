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


@pytest.mark.parametrize(
    "name, bits, rate",
    [
        ("A10", 384, 12.5),
        ("A40", 384, 14.5),
        ("L4", 192, 12.5),
        ("L40", 384, 18),
        ("L40S", 384, 18),
        ("RTX 6000 Ada Generation", 384, 20),
        ("RTX A6000", 384, 16),
        ("RTX PRO 6000 Blackwell Workstation Edition", 512, 28),
        ("RTX 3060", 192, 15),
        ("RTX 3080", 320, 19),
        ("RTX 3090", 384, 19.5),
        ("RTX 3090 Ti", 384, 21),
        ("RTX 4060", 128, 17),
        ("RTX 4060 Ti", 128, 18),
        ("RTX 4070", 192, 21),
        ("RTX 4070 SUPER", 192, 21),
        ("RTX 4070 Ti", 192, 21),
        ("RTX 4070 Ti SUPER", 256, 21),
        ("RTX 4080", 256, 22.4),
        ("RTX 4080 SUPER", 256, 23),
        ("RTX 4090", 384, 21),
        ("RTX 5070", 192, 28),
        ("RTX 5070 Ti", 256, 28),
        ("RTX 5080", 256, 30),
        ("RTX 5090", 512, 28),
        ("T4", 256, 10),
        ("A100-SXM4-40GB", 5120, 2.43),
        ("A100 80GB PCIe", 5120, 3.024),
        ("A100-SXM4-80GB", 5120, 3.186),
        ("H200", 6144, 6.25),
    ],
)
def test_a_data_sheet_has_the_width_of_the_bus_times_its_rate(name: str, bits: int, rate: float) -> None:
    assert datasheet(name) == round(bits * rate / 8)
