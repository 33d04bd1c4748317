"""Test a folder's tensors against hostile indexes and links (A12, A19 to A24)."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.safetensors_header import INDEX, SINGLE
from mycli.runtime.errors import ModelError, NotFoundError
from mycli.runtime.hub.store import missing_files
from tests.attacks.safetensors_attacks import ATTACKS, SHARD_NAMES, simple

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
A, B = {"a": ("F32", (2,), bytes(8))}, {"b": ("F32", (1,), bytes(4))}


def sharded(folder: Path, **weight_map: Any) -> Path:
    (folder / SHARDS[0]).write_bytes(simple(**A))
    (folder / SHARDS[1]).write_bytes(simple(**B))
    index = {"metadata": {"total_size": 12}, "weight_map": {"a": SHARDS[0], "b": SHARDS[1], **weight_map}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_single_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(simple(**A, **B))
    manifest = Manifest.open(tmp_path)
    assert (list(manifest.tensors), manifest.nbytes, manifest.warnings) == (["a", "b"], 12, ())


def test_shards(tmp_path: Path) -> None:
    manifest = Manifest.open(sharded(tmp_path))
    assert {name: entry.file for name, entry in manifest.tensors.items()} == {"a": SHARDS[0], "b": SHARDS[1]}
    assert manifest.warnings == ()


def test_a_single_file_counts_next_to_an_index_of_shards_that_are_gone(tmp_path: Path) -> None:
    """As in transformers; published copies of a model often keep the index of the original's shards."""
    (sharded(tmp_path) / SINGLE).write_bytes(simple(**A, **B))
    assert set(Manifest.open(tmp_path).files) == set(SHARDS), "a whole set of shards comes first"
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(ModelError, match=f"{SHARDS[1]} missing"):
        Manifest.open(tmp_path)
    (tmp_path / SHARDS[0]).unlink()
    manifest = Manifest.open(tmp_path)
    assert set(manifest.files) == {SINGLE} and set(manifest.tensors) == {"a", "b"}
    assert missing_files(tmp_path, None) == ["config.json"]


def test_an_index_of_other_shards_is_not_reported_as_an_incomplete_download(tmp_path: Path) -> None:
    """Conversions that keep the index of the original: the shards that it names need not be downloaded."""
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00003.safetensors"}}))
    with pytest.raises(ModelError, match=f"names model-00001-of-00003.* holds {SHARDS[0]}, {SHARDS[1]}") as caught:
        Manifest.open(tmp_path)
    assert caught.value.code == "replace-index"


@pytest.mark.parametrize("case", ["A1-empty", "A6-one-byte-short", "A11-duplicate-name", "A18-html", "A18-zip"])
def test_hostile_file_is_named(case: str, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(ATTACKS[case][0]())
    with pytest.raises(ModelError, match=f"^{SINGLE}: .*{ATTACKS[case][1]}"):
        Manifest.open(tmp_path)


@pytest.mark.parametrize("case", SHARD_NAMES)
def test_shard_name_rejected(case: str, tmp_path: Path) -> None:
    sharded(tmp_path, c=SHARD_NAMES[case])
    with pytest.raises(ModelError, match="which is not a shard") as caught:
        Manifest.open(tmp_path)
    assert "\n" not in caught.value.message
    if case in ("A21-bin", "A21-pt"):
        assert "pickles can run code" in caught.value.hint


def _index(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(text)


def _shard(number: int, **tensors: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / SHARDS[number]).write_bytes(simple(**tensors))


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "A12-in-two-shards": (_shard(1, **A, **B), f"^a: both in {SHARDS[0]} and in {SHARDS[1]}"),
    "A12-in-wrong-shard": (
        lambda folder: sharded(folder, a=SHARDS[1], b=SHARDS[0]),
        f"a should be in {SHARDS[1]}, but is in {SHARDS[0]}",
    ),
    "A22-shard-missing": (lambda folder: (folder / SHARDS[1]).unlink(), f"{SHARDS[1]} missing"),
    "A22-tensor-missing": (lambda folder: sharded(folder, c=SHARDS[0]), "'c' should be in .* but is in no shard"),
    "A22-index-missing": (lambda folder: (folder / INDEX).unlink(), f"without {INDEX}"),
    "A22-index-empty": (_index('{"weight_map": {}}'), "lists no tensors"),
    "A22-index-without-map": (_index("{}"), "lists no tensors"),
    "A22-index-list": (_index("[]"), "must hold an object"),
    "A22-index-map-list": (_index('{"weight_map": ["a"]}'), "weight_map must be an object"),
    "A22-index-duplicate": (
        _index('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'),
        "duplicate key 'a'",
    ),
    "A22-index-33MB": (_index('{"weight_map": {"a": "' + "x" * (33 << 20) + '"}}'), "more than the 32 MiB allowed"),
    "A13-index-too-many-values": (_index('{"weight_map": {"a": [' + "0," * 350_001 + "0]}}"), "more than the 350000"),
    "A14-index-deep": (_index('{"weight_map": ' + "[" * 100_000 + "]" * 100_000 + "}"), "nested too deeply"),
    "A24-index-is-fifo": (lambda folder: ((folder / INDEX).unlink(), os.mkfifo(folder / INDEX)), "not a regular file"),
    "A24-shard-is-fifo": (
        lambda folder: ((folder / SHARDS[0]).unlink(), os.mkfifo(folder / SHARDS[0])),
        "not a regular",
    ),
    "A24-shard-is-folder": (
        lambda folder: ((folder / SHARDS[0]).unlink(), (folder / SHARDS[0]).mkdir()),
        "not a regular",
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folder_rejected(case: str, tmp_path: Path) -> None:
    change, problem = FOLDERS[case]
    change(sharded(tmp_path))
    with pytest.raises(ModelError, match=problem):
        Manifest.open(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt", "model.pkl"])
def test_pickles_alone_are_refused(name: str, tmp_path: Path) -> None:
    """A19: the pickle file is never opened."""
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(ModelError, match=f"only as pickles .*{name}") as caught:
        Manifest.open(tmp_path)
    assert "safetensors/convert" in caught.value.hint


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"no {SINGLE} and no {INDEX}"):
        Manifest.open(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="only as GGUF"):
        Manifest.open(tmp_path)


@pytest.mark.parametrize("name", ["missing", "file", "file/below", "x" * 300, "nul\0"])
def test_no_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotFoundError):
        Manifest.open(tmp_path / name)


def test_extra_shard_is_a_warning(tmp_path: Path) -> None:
    """A22: a file missing from the index is not part of the model and is not read."""
    (sharded(tmp_path) / "old.safetensors").write_bytes(b"junk")
    manifest = Manifest.open(tmp_path)
    assert set(manifest.tensors) == {"a", "b"}
    assert manifest.warnings == (f"old.safetensors not in {INDEX}: not used",)


def test_links_of_the_hugging_face_cache_are_legal(tmp_path: Path) -> None:
    """A23: a snapshot contains only links to blobs."""
    snapshot, blobs = tmp_path / "models--o--m/snapshots/abc", tmp_path / "models--o--m/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "0123").write_bytes(simple(**A))
    (snapshot / SINGLE).symlink_to("../../blobs/0123")
    manifest = Manifest.open(snapshot)
    assert (list(manifest.tensors), manifest.warnings) == (["a"], ())
    assert manifest.tensors["a"].file == SINGLE


@pytest.mark.parametrize("outside", [True, False])
def test_link_out_of_the_folder_is_a_warning(outside: bool, tmp_path: Path) -> None:
    """A23: outside a cache such a link may be intended, so it is reported but allowed."""
    folder = tmp_path / "model"
    folder.mkdir()
    target = (tmp_path if outside else folder) / "elsewhere"
    target.write_bytes(simple(**A))
    (folder / SINGLE).symlink_to(target)
    warnings = Manifest.open(folder).warnings
    assert ["outside the folder" in warning for warning in warnings] == ([True] if outside else [])


def test_folder_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    sharded(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    assert Manifest.open(tmp_path / "link").warnings == ()


def test_three_megabytes_of_header(tmp_path: Path) -> None:
    """A13: the header of a large valid model costs no more than its parsing."""
    tensors = {f"model.layers.{i}.self_attn.q_proj.weight_packed": ("I32", (0, 8), b"") for i in range(30_000)}
    (tmp_path / SINGLE).write_bytes(simple(**tensors))
    assert len(Manifest.open(tmp_path).tensors) == 30_000


def test_needs_no_torch() -> None:
    names = "mycli.runtime.checkpoint.manifest, mycli.runtime.utils.atomic_folder"
    code = f"import sys, {names}; sys.exit(bool({{'torch', 'numpy'}} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
