"""Test that hostile stores of Ollama and LM Studio are refused with one line, and that nothing outside them is read.

python -m tests.attacks.test_other_stores SECONDS damages manifests for that many seconds of the processor.
"""

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mycli.runtime.errors import ModelError, UserError
from mycli.runtime.hub.local import local_models
from mycli.runtime.hub.other_stores import find_stored, stored_models
from tests.attacks.fuzz import _bytes, _other
from tests.support.other_stores import ADAPTER, MODEL, lm_studio, ollama

SHA = "sha256:" + "a" * 64
DEEP = b'{"layers":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
LAYER = {"mediaType": MODEL, "digest": SHA, "size": 4}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


def _refused(name: str = "tiny:1b") -> str:
    with pytest.raises(ModelError) as caught:
        find_stored(name)
    message = caught.value.message
    assert "\n" not in message and len(message) < 400
    assert [model.problem for model in stored_models()] == [message]
    assert message in [model.problem for model in local_models()]
    return message


LAYERS: dict[str, tuple[Any, str]] = {
    "none": ([], "0 layers are models"),
    "two-models": ([LAYER, LAYER], "2 layers are models"),
    "not-a-list": ({"a": 1}, "layers must be a list"),
    "not-objects": (["x"], "layers must hold values of type dict"),
    "too-many": ([LAYER] * 1001, "at most 1000"),
    "traversal": ([{**LAYER, "digest": "sha256:../../../../etc/passwd"}], "is not a SHA-256"),
    "short-digest": ([{**LAYER, "digest": "sha256:abc"}], "is not a SHA-256"),
    "newline-digest": ([{**LAYER, "digest": SHA + "\n"}], "is not a SHA-256"),
    "number-digest": ([{**LAYER, "digest": 7}], "is not a SHA-256"),
    "other-hash": ([{**LAYER, "digest": "md5:" + "a" * 64}], "is not a SHA-256"),
    "missing-blob": ([LAYER], "is missing in"),
    "two-adapters": ([LAYER, *[{**LAYER, "mediaType": ADAPTER}] * 2], "2 adapters"),
    "adapter-alone": ([{**LAYER, "mediaType": ADAPTER}], "0 layers are models"),
    "adapter-traversal": ([LAYER, {**LAYER, "mediaType": ADAPTER, "digest": "sha256:../x"}], "is not a SHA-256"),
    "wrong-kind": ([{**LAYER, "mediaType": "text/html"}], "0 layers are models"),
    "kind-is-a-list": ([{**LAYER, "mediaType": [MODEL]}], "0 layers are models"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_hostile_layers(name: str, home: Path) -> None:
    layers, cause = LAYERS[name]
    ollama(home, b"GGUF", layers=layers)
    assert cause in _refused()


@pytest.mark.parametrize("size", [3, 5, -1, "4", None, True, 1 << 70])
def test_a_size_that_is_not_the_blobs(size: object, home: Path) -> None:
    path = ollama(home, b"GGUF")
    manifest = json.loads(path.read_text())
    manifest["layers"][0]["size"] = size
    path.write_text(json.dumps(manifest))
    assert "has 4 bytes, expected" in _refused()


@pytest.mark.parametrize("kind", ["text/html", "application/vnd.oci.image.index.v1+json", 7, ["x"]])
def test_something_else_than_a_manifest(kind: object, home: Path) -> None:
    ollama(home, b"GGUF", mediaType=kind)
    assert "mediaType" in _refused()


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "empty"),
        (b"[]", "must hold an object"),
        (b"\xff\xfe", "not acceptable JSON"),
        (DEEP, "nested too deeply"),
        (b'{"layers": [], "layers": []}', "duplicate key"),
        (b'{"pad": "' + b"x" * (1 << 20) + b'"}', "more than"),
        (b'{"layers": NaN}', "not acceptable JSON"),
    ],
    ids=["empty", "list", "binary", "deep", "twice", "huge", "nan"],
)
def test_a_manifest_that_is_not_json(data: bytes, cause: str, home: Path) -> None:
    ollama(home, b"GGUF").write_bytes(data)
    assert cause in _refused()


def test_links_are_not_followed(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither a manifest, nor a folder of manifests, nor a blob may be a link out of the store."""
    other = tmp_path_factory.mktemp("other")
    path = ollama(home, b"GGUF")
    blob = next((home / ".ollama/models/blobs").iterdir())
    blob.rename(other / "blob")
    blob.symlink_to(other / "blob")
    assert "a link" in _refused()
    blob.unlink()
    (other / "blob").rename(blob)
    path.rename(other / "1b")
    path.symlink_to(other / "1b")
    assert "a link" in _refused()
    path.unlink()
    path.parent.rmdir()
    path.parent.symlink_to(other)
    assert "a link" in _refused()


def test_a_blob_that_is_not_a_file(home: Path) -> None:
    ollama(home, b"GGUF")
    blob = next((home / ".ollama/models/blobs").iterdir())
    blob.unlink()
    blob.mkdir()
    assert "bytes, expected" in _refused()


@pytest.mark.parametrize(
    "name",
    [
        "../tiny:1b",
        "..:1b",
        "a/../../b:1b",
        "tiny:../../x",
        "tiny:1b/..",
        "/etc/passwd",
        "a/b/c/d/e:1b",
        "a\0b",
        "",
        ":",
    ],
)
def test_names_are_not_paths(name: str, home: Path) -> None:
    """A name that could leave the store is not looked up."""
    ollama(home, b"GGUF", "registry.ollama.ai", "library", "tiny", "1b")
    with mock.patch("pathlib.Path.joinpath", side_effect=AssertionError("looked up")):
        assert find_stored(name) is None


def test_a_link_in_lm_studios_store(home: Path) -> None:
    file = lm_studio(home, b"GGUF", "org/tiny/tiny.gguf")
    file.rename(home / "elsewhere.gguf")
    file.symlink_to(home / "elsewhere.gguf")
    assert "a link" in _refused("org/tiny")
    file.unlink()
    file.symlink_to(file)
    assert "a link" in _refused("org/tiny")


def damage_manifests(seconds: float, seed: int = 0) -> tuple[int, int]:
    """Damage manifests for `seconds` of CPU time; return the number of cases and of those still accepted."""
    start, cases, accepted = time.process_time(), 0, 0
    with tempfile.TemporaryDirectory() as name, mock.patch.dict("os.environ", {"HOME": name, "OLLAMA_MODELS": ""}):
        path = ollama(Path(name), b"GGUF")
        valid = path.read_bytes()
        blob = next((Path(name) / ".ollama/models/blobs").iterdir())
        while time.process_time() - start < seconds or not cases:
            draw = random.Random(f"{seed} {cases}")
            changed = _other(json.loads(valid), draw)
            path.write_bytes(_bytes(valid, draw) if draw.random() < 0.5 else json.dumps(changed).encode())
            cases += 1
            try:
                stored = find_stored("tiny:1b")
            except UserError as error:
                assert "\n" not in error.message, error.message
                continue
            assert stored is not None and stored.path == blob  # damage elsewhere in the file
            accepted += 1
    return cases, accepted


def test_damaged_manifests() -> None:
    cases, accepted = damage_manifests(0.3)
    assert cases > 20 and accepted < cases


if __name__ == "__main__":
    print("{} cases, {} still accepted".format(*damage_manifests(float(sys.argv[1]))))
