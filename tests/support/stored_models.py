"""Writes models to disk as a pull and as `quantize` leave them, with given contents."""

import hashlib
import json
import shutil
from pathlib import Path

from mycli.runtime.hub import store
from mycli.runtime.hub.integrity import files_to_verify, find_local, verify_files
from tests.support.hub_server import git_digest
from tests.support.paths import PICO

FIRST, SECOND = "a" * 40, "b" * 40
FILES = {"config.json": b"{}", "model.safetensors": b"weights" * 100}


def digest(data: bytes) -> str:
    """Return the hub's digest: git's blob hash for small files, sha256 for large ones."""
    return git_digest(data) if len(data) < 100 else hashlib.sha256(data).hexdigest()


def cached(files: dict[str, bytes], commit: str = FIRST, ref: str = "main", record: bool = True) -> Path:
    """Write `org/tiny` to the cache and return the snapshot; `record`: whether its commit has a tree."""
    folder = store.repo_folder("org/tiny")
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


def quantized(name: str = "tiny-int4", home: Path | None = None) -> Path:
    """Write pico as `name` to `home`, with the record that quantizing writes; return its folder."""
    folder = (home or store.data_dir()) / "models" / name
    shutil.copytree(PICO, folder)
    files = {
        path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
        for path in folder.iterdir()
    }
    (folder / "mycli.json").write_text(json.dumps({"schema_version": 1, "files": files}))
    return folder


def checked(model: str) -> dict[str, str]:
    source = find_local(model)
    return {file.name: file.state for file in verify_files(source, files_to_verify(source), lambda amount: None)}
