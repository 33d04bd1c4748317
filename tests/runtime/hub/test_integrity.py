"""Test that stored models are verified by size and hash, and that damaged files can be removed."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from mycli.runtime.checkpoint.safetensors_header import INDEX
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.hub.integrity import drop_damaged, files_to_verify, find_local, verify_files
from mycli.runtime.hub.resolve import Source, resolve
from mycli.runtime.hub.store import repo_folder
from tests.support.paths import PICO
from tests.support.stored_models import FILES, FIRST, SECOND, cached, checked, quantized

pytestmark = pytest.mark.usefixtures("folders")


def test_a_whole_model_is_ok() -> None:
    cached(FILES)
    assert checked("org/tiny") == {"config.json": "ok", "model.safetensors": "ok"}
    cached(FILES, SECOND, ref="v2", record=False)
    assert checked("org/tiny@v2") == {"config.json": "ok", "model.safetensors": "ok"}
    quantized()
    assert set(checked("tiny-int4").values()) == {"ok"}


@pytest.mark.parametrize("record", [True, False])
def test_a33_a_flipped_bit_is_found(record: bool) -> None:
    folder = cached(FILES, record=record)
    blob = (folder / "model.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[333] ^= 1
    blob.write_bytes(data)
    assert checked("org/tiny") == {"config.json": "ok", "model.safetensors": "damaged"}


def test_a33_a_flipped_bit_of_a_quantized_model() -> None:
    folder = quantized()
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    assert checked("tiny-int4")["model.safetensors"] == "damaged"
    assert checked(str(folder))["model.safetensors"] == "damaged"
    (folder / "generation_config.json").unlink()
    (folder / "extra.txt").write_text("?")
    states = checked("tiny-int4")
    assert states["generation_config.json"] == "missing" and states["extra.txt"] == "unrecorded"


def test_truncated_and_missing_files() -> None:
    folder = cached(FILES)
    (folder / "config.json").resolve().write_bytes(b"{")
    (folder / "model.safetensors").resolve().unlink()
    assert checked("org/tiny") == {"config.json": "damaged", "model.safetensors": "missing"}
    source = find_local("org/tiny")
    sizes = [file.nbytes for file in verify_files(source, files_to_verify(source), lambda amount: None)]
    assert sizes == [1, 0]


def test_a_damaged_index_is_damage_not_a_crash() -> None:
    folder = cached({"config.json": b"{}", INDEX: b'{"weight_map": {"w": "model.safetensors"}}', **FILES})
    (folder / INDEX).resolve().write_bytes(b"{" * 42)
    assert checked("org/tiny")[INDEX] == "damaged"


def test_dropped_files_are_what_the_next_pull_fetches() -> None:
    folder = cached(FILES)
    blob = (folder / "model.safetensors").resolve()
    blob.write_bytes(b"?")
    source = find_local("org/tiny")
    assert drop_damaged(source, verify_files(source, files_to_verify(source), lambda amount: None)) == [
        "model.safetensors"
    ]
    assert not blob.exists() and checked("org/tiny") == {"config.json": "ok", "model.safetensors": "missing"}


def test_a_link_out_of_the_cache_is_dropped_without_its_target(tmp_path: Path) -> None:
    folder = cached(FILES)
    target = tmp_path / "precious.txt"
    target.write_text("?")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(target)
    source = find_local("org/tiny")
    assert drop_damaged(source, verify_files(source, files_to_verify(source), lambda amount: None)) == [
        "model.safetensors"
    ]
    assert target.read_text() == "?" and not (folder / "model.safetensors").is_symlink()


def test_what_nothing_is_known_of_cannot_be_verified() -> None:
    shutil.copytree(PICO, Path("plain"))
    for model in ("pico", "./plain"):
        with pytest.raises(ModelError, match="no mycli.json"):
            checked(model)


@pytest.mark.parametrize(
    "files",
    [
        {"../../x": {"sha256": "0" * 64, "bytes": 1}},
        {"w": {"sha256": "0", "bytes": 1}},
        {"w": {"sha256": "0" * 64, "bytes": -1}},
        {"w": {"bytes": 1}},
        {"w": 3},
        3,
    ],
)
def test_a_hostile_record(files: object) -> None:
    folder = quantized()
    (folder / "mycli.json").write_text(json.dumps({"files": files}))
    with pytest.raises(ModelError):
        checked("tiny-int4")


def test_modules_and_templates_are_verified_below_the_folder() -> None:
    folder = quantized()
    record = json.loads((folder / "mycli.json").read_text())
    names = ("1_Pooling/config.json", "additional_chat_templates/tools.jinja")
    for name in names:
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(b"{}")
        record["files"][name] = {"sha256": hashlib.sha256(b"{}").hexdigest(), "bytes": 2}
    (folder / "mycli.json").write_text(json.dumps(record))
    states = checked("tiny-int4")
    assert set(names) <= states.keys() and set(states.values()) == {"ok"}


def test_find_local_is_resolve_for_everything_else() -> None:
    cached(FILES)
    assert (
        find_local("org/tiny")
        == resolve("org/tiny")
        == Source("org/tiny", repo_folder("org/tiny") / "snapshots" / FIRST, "org/tiny", FIRST)
    )
    with pytest.raises(NotFoundError):
        find_local("org/none")


def test_only_a_commit_below_snapshots_is_a_cached_model() -> None:
    """The folder of a quantized model may have any name; its record is mycli.json."""
    folder = quantized()
    for parent, name in (("snapshots", "mine"), ("others", FIRST)):
        Path(parent).mkdir()
        target = shutil.copytree(folder, Path(parent) / name)
        (target / "model.safetensors").write_bytes(b"?")
        states = checked(f"./{target}")
        assert states["model.safetensors"] == "damaged" and states["config.json"] == "ok"


def test_a_plain_file_between_the_links_has_no_record() -> None:
    folder = cached(FILES, record=False)
    (folder / "notes.txt").write_text("mine")
    assert checked("org/tiny") == {"config.json": "ok", "model.safetensors": "ok", "notes.txt": "unrecorded"}


def test_folders_and_the_record_are_no_files_of_a_model() -> None:
    folder = quantized()
    (folder / "sub").mkdir()
    source = find_local("tiny-int4")
    names = [file.name for file in verify_files(source, files_to_verify(source), lambda amount: None)]
    assert sorted(names) == sorted(path.name for path in folder.iterdir() if path.name not in ("mycli.json", "sub"))


def test_damage_that_no_hub_can_mend_is_refused_and_health_is_not() -> None:
    folder = quantized()
    source = find_local("tiny-int4")
    assert drop_damaged(source, verify_files(source, files_to_verify(source), lambda amount: None)) == []
    (folder / "model.safetensors").write_bytes(b"?")
    with pytest.raises(UsageError, match="only files that came from a hub"):
        drop_damaged(source, verify_files(source, files_to_verify(source), lambda amount: None))
    assert (folder / "model.safetensors").exists()
