"""What is stored: listed with what is wrong with it, verified byte by byte, removed without touching anything else."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mycli.runtime.errors import ExitCode, ModelError, NotFoundError, UsageError, UserError
from mycli.runtime.hub import local as store
from mycli.runtime.hub import resolve as hub
from mycli.runtime.hub.resolve import Source
from tests.support.hub_server import git_digest
from tests.support.paths import PICO

FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MYCLI_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def digest(data: bytes) -> str:
    return git_digest(data) if len(data) < 100 else hashlib.sha256(data).hexdigest()


def cached(files: dict[str, bytes], commit: str = FIRST, ref: str = "main", record: bool = True) -> Path:
    """As a pull leaves it."""
    folder = hub.repo_folder("org/tiny")
    for path in (folder / "blobs", folder / "snapshots" / commit, folder / "trees", folder / "refs"):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    for name, data in files.items():
        (folder / "blobs" / digest(data)).write_bytes(data)
        (folder / "snapshots" / commit / name).symlink_to(f"../../blobs/{digest(data)}")
    if record:
        entries = {
            n: {"size": len(d), "blob_id": "c" * 40, "lfs_sha256": digest(d), "lfs_size": len(d)}
            for n, d in files.items()
        }
        (folder / "trees" / f"{commit}.json").write_text(json.dumps({"format_version": 1, "files": entries}))
    return folder / "snapshots" / commit


FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 100}


def quantized(name: str = "tiny-int4") -> Path:
    """As quantize leaves it."""
    folder = hub.home() / "models" / name
    shutil.copytree(PICO, folder)
    files = {
        path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
        for path in folder.iterdir()
    }
    (folder / "mycli.json").write_text(json.dumps({"schema_version": 1, "files": files}))
    return folder


def checked(model: str) -> dict[str, str]:
    source = store.find_local(model)
    return {
        file.name: file.state for file in store.verify_files(source, store.files_to_verify(source), lambda amount: None)
    }


def rows() -> dict[str, tuple[str, int, str]]:
    return {entry.name: (entry.kind, entry.nbytes, entry.problem) for entry in store.local_models()}


def test_all_kinds_are_listed() -> None:
    cached(FILES)
    folder = quantized()
    found = rows()
    assert list(found) == ["pico", "pico-draft", "tiny-int4", "org/tiny"]
    assert found["org/tiny"][:2] == ("hub", 702)
    assert found["tiny-int4"][:2] == ("quantized", sum(p.stat().st_size for p in folder.iterdir()))


def _cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder: None, ""),
        (lambda folder: (folder / "config.json").unlink(), "incomplete: config.json missing"),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2"}'),
            "unsupported: config.json: model",
        ),
        (lambda folder: _cut(folder / "config.json", 0.5), "damaged: config.json"),
        (lambda folder: _cut(folder / "model.safetensors", 0.9), "damaged: model.safetensors"),
        (lambda folder: _cut(folder / "model.safetensors", 0), "damaged: model.safetensors: empty file"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: _cut(folder / "tokenizer.json", 0.7), "damaged: tokenizer.json is cut off"),
    ],
    ids=["whole", "no-config", "family", "half-a-config", "cut-weights", "empty-weights", "no-tokenizer", "half-of-it"],
)
def test_a_model_that_cannot_answer_is_not_called_ready(change: Callable[[Path], object], problem: str) -> None:
    folder = hub.home() / "models" / "copy"
    shutil.copytree(PICO, folder)
    change(folder)
    assert rows()["copy"][2].startswith(problem) and bool(rows()["copy"][2]) == bool(problem)
    assert removed("copy") > 0 and not folder.exists(), "what is damaged can be removed by name"


def test_each_commit_has_the_name_that_reaches_it() -> None:
    cached(FILES)
    cached(FILES | {"config.json": b'{"a": 1}'}, SECOND, ref="v2")
    assert {"org/tiny", "org/tiny@v2"} <= rows().keys()
    (hub.repo_folder("org/tiny") / "refs" / "v2").unlink()
    assert f"org/tiny@{SECOND}" in rows()
    for name in rows():
        assert hub.resolve(name).folder.is_dir()


def test_what_cannot_be_used_says_why() -> None:
    folder = cached(FILES)
    (folder / "model.safetensors").unlink()
    (hub.repo_folder("org/tiny") / "blobs" / "x.mycli.incomplete").write_bytes(b"half")
    assert rows()["org/tiny"] == ("hub", 6, "incomplete: model.safetensors missing")
    cached({"config.json": b"{}", "pytorch_model.bin": b"x"}, SECOND, ref="old")
    assert rows()["org/tiny@old"][2] == "no safetensors"


def test_an_empty_machine() -> None:
    assert [entry.kind for entry in store.local_models()] == ["built-in", "built-in"]


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


def test_a_damaged_index_is_damage_not_a_crash() -> None:
    folder = cached({"config.json": b"{}", hub.INDEX: b'{"weight_map": {"w": "model.safetensors"}}', **FILES})
    (folder / hub.INDEX).resolve().write_bytes(b"{" * 42)
    assert checked("org/tiny")[hub.INDEX] == "damaged"


def test_dropped_files_are_what_the_next_pull_fetches() -> None:
    folder = cached(FILES)
    blob = (folder / "model.safetensors").resolve()
    blob.write_bytes(b"?")
    source = store.find_local("org/tiny")
    assert store.drop_damaged(
        source, store.verify_files(source, store.files_to_verify(source), lambda amount: None)
    ) == ["model.safetensors"]
    assert not blob.exists() and checked("org/tiny") == {"config.json": "ok", "model.safetensors": "missing"}


def test_what_nothing_is_known_of_cannot_be_verified(folders: Path) -> None:
    shutil.copytree(PICO, folders / "plain")
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


# Removing


def removed(model: str) -> int:
    removal = store.plan_removal(model)
    store.remove(removal, lambda text: None)
    return removal.nbytes


def test_a_whole_repository_goes_and_nothing_else(folders: Path) -> None:
    cached(FILES)
    (hub.repo_folder("org/tiny") / "blobs" / "x.mycli.incomplete").write_bytes(b"half")
    other = hub.repo_folder("org/other")
    other.mkdir()
    assert removed("org/tiny") >= 706
    assert not hub.repo_folder("org/tiny").exists() and other.exists()
    assert [path.name for path in (folders / "hub").iterdir() if not path.name.startswith(".locks")] == [other.name]


def test_one_revision_leaves_what_another_uses() -> None:
    cached(FILES)
    kept = cached(FILES | {"config.json": b'{"a": 1}'}, SECOND, ref="v2")
    assert removed("org/tiny@main") == 2
    assert set(checked("org/tiny@v2").values()) == {"ok"} and kept.exists()
    assert not (hub.repo_folder("org/tiny") / "trees" / f"{FIRST}.json").exists()
    with pytest.raises(NotFoundError):
        hub.resolve("org/tiny")


def test_an_unfinished_download_can_be_removed() -> None:
    cached(FILES)
    shutil.rmtree(hub.repo_folder("org/tiny") / "snapshots")
    shutil.rmtree(hub.repo_folder("org/tiny") / "refs")
    removed("org/tiny")
    assert not hub.repo_folder("org/tiny").exists()


def test_a_quantized_model_goes_by_its_name() -> None:
    folder = quantized()
    quantized("other")
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert removed("tiny-int4") == size
    assert [path.name for path in folder.parent.iterdir()] == ["other"]


def test_a_link_is_removed_not_what_it_points_to(folders: Path) -> None:
    shutil.copytree(PICO, folders / "mine")
    link = hub.home() / "models" / "linked"
    link.parent.mkdir(parents=True)
    link.symlink_to(folders / "mine")
    removed("linked")
    assert not link.is_symlink() and (folders / "mine" / "config.json").exists()


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("pico", ExitCode.USAGE),
        ("./mine", ExitCode.USAGE),
        ("mine", ExitCode.USAGE),
        ("org/mine", ExitCode.USAGE),
        ("~", ExitCode.USAGE),
        ("/", ExitCode.USAGE),
        ("..", ExitCode.USAGE),
        ("nothing", ExitCode.NOT_FOUND),
        ("org/nothing", ExitCode.NOT_FOUND),
        ("org/tiny@v9", ExitCode.NOT_FOUND),
        ("org/../..", ExitCode.USAGE),
    ],
)
def test_what_mycli_did_not_store_is_left_alone(model: str, code: ExitCode, folders: Path) -> None:
    cached(FILES)
    for folder in (folders / "mine", folders / "org" / "mine"):
        shutil.copytree(PICO, folder)
    with pytest.raises(UserError) as caught:
        store.plan_removal(model)
    assert caught.value.exit_code == code
    assert isinstance(caught.value, UsageError | NotFoundError)


def test_find_local_is_resolve_for_everything_else() -> None:
    cached(FILES)
    assert (
        store.find_local("org/tiny")
        == hub.resolve("org/tiny")
        == Source("org/tiny", hub.repo_folder("org/tiny") / "snapshots" / FIRST, "org/tiny", FIRST)
    )
    with pytest.raises(NotFoundError):
        store.find_local("org/none")
