"""Test that measurements of a file are found again, and not for another file of its name."""

from pathlib import Path

import pytest

from mycli.runtime.hub.activation_record import record_kl, recorded_kl
from mycli.runtime.hub.store import state_dir


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    return path


def test_a_record_belongs_to_a_version_of_a_file(file: Path) -> None:
    assert recorded_kl(file) is None
    record_kl(file, 0.0002)
    assert recorded_kl(file) == 0.0002
    file.write_bytes(b"another")
    assert recorded_kl(file) is None
    assert recorded_kl(file.with_name("missing.gguf")) is None


@pytest.mark.parametrize("damage", ["{", '{"kl": -1}', '{"kl": NaN}', '{"kl": "0"}', "{}"])
def test_a_damaged_record_is_ignored(file: Path, damage: str) -> None:
    record_kl(file, 0.0002)
    [path] = (state_dir() / "activations").iterdir()
    path.write_text(damage)
    assert recorded_kl(file) is None


def test_an_unwritable_folder_is_no_error(file: Path) -> None:
    state_dir().mkdir(parents=True)
    (state_dir() / "activations").write_bytes(b"")
    record_kl(file, 0.0002)
    assert recorded_kl(file) is None
