"""Whether the files of a stored model are what they should be, byte by byte.

Knows what says so: the record of a model quantized here, the tree of a commit, and names of blobs, which are hashes.
Uses no network, and opens weights only to hash them.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mycli.runtime.checkpoint.gguf.files import part_names
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.hub.names import GGUF, is_hub_name, split_file, split_name
from mycli.runtime.hub.partial_file import hasher
from mycli.runtime.hub.resolve import Source, resolve
from mycli.runtime.hub.store import (
    COMMIT,
    DIGEST,
    RECORD,
    HubFile,
    file_bytes,
    missing_files,
    read_ref,
    read_tree,
    repo_folder,
)
from mycli.runtime.utils.json_fields import read_object

MAX_RECORD_BYTES = 16 << 20
_BLOCK = 1 << 20

State = Literal["ok", "damaged", "missing", "unrecorded"]


@dataclass(frozen=True)
class CheckedFile:
    """One file after `verify_files`; `state` "unrecorded": nothing says what its contents should be."""

    name: str
    nbytes: int
    state: State


def find_local(model: str) -> Source:
    """Like `resolve`, but also a model of the cache that lacks files: `verify_files` is there to say which."""
    try:
        return resolve(model)
    except (NotFoundError, ModelError):
        if not is_hub_name(model):
            raise
        repo, revision = split_name(model)
        commit = read_ref(repo_folder(repo), revision or "main")
        snapshot = repo_folder(repo) / "snapshots" / (commit or "none")
        if not snapshot.is_dir():
            raise
        return Source(model, snapshot / (split_file(model)[1] or ""), repo, commit)


def files_to_verify(source: Source) -> dict[str, HubFile]:
    """What is known of the files of a stored model, by name. Raises ModelError where nothing is known."""
    if source.folder.suffix == GGUF:
        return _linked_parts(source)
    in_cache = source.folder.parent.name == "snapshots" and COMMIT.fullmatch(source.folder.name)
    return _linked(source) if in_cache else _recorded(source)


def _linked_parts(source: Source) -> dict[str, HubFile]:
    """Of a GGUF model in the cache: its parts, each linked to a blob whose name is its hash."""
    folder = source.folder.parent
    if folder.parent.name != "snapshots" or not COMMIT.fullmatch(folder.name):
        hint = "models that were pulled or quantized by mycli can be verified"
        raise ModelError(f"{source.folder}: a single file, so nothing says what it should hold", hint)
    known = _linked(replace(source, folder=folder))
    return {name: known.get(name, HubFile(name, 0, "0" * 64)) for name in part_names(source.folder.name)}


def _recorded(source: Source) -> dict[str, HubFile]:
    """Names, sizes and digests that a local model's own record holds. Raises ModelError where there is none."""
    path = source.folder / RECORD
    if not path.exists():
        hint = "models that were pulled or quantized by mycli can be verified"
        raise ModelError(f"{source.folder}: no {RECORD}, so nothing says what its files should hold", hint)
    entries = read_object(path, MAX_RECORD_BYTES).object("files")
    found = {}
    for name in entries.values:
        entry = entries.object(name)
        digest = entry.text("sha256")
        if not re.fullmatch(r"[0-9a-f]{64}", digest) or "/" in name or name in ("", ".", ".."):
            raise entry.fail("sha256", "is not a hash of a file beside it")
        found[name] = HubFile(name, entry.integer("bytes", low=0, high=1 << 60), digest)
    return found


def _linked(source: Source) -> dict[str, HubFile]:
    """Of a snapshot in the cache: the record of its commit, and for other files the name of the blob, its hash."""
    tree = {file.name: file for file in read_tree(source.folder.parent.parent, source.folder.name) or ()}
    found = {}
    for path in source.folder.iterdir():
        if path.name in tree:
            found[path.name] = tree[path.name]
        elif path.is_symlink() and DIGEST.fullmatch(path.readlink().name):
            found[path.name] = HubFile(path.name, file_bytes(path), path.readlink().name)
    with suppress(ModelError):  # an index that cannot be read: its own hash will say so
        for name in missing_files(source.folder, tree.values()):
            found.setdefault(name, tree.get(name, HubFile(name, 0, "0" * 64)))
    return found


def verify_files(source: Source, files: dict[str, HubFile], advance: Callable[[float], None]) -> list[CheckedFile]:
    """Compare size and hash of each file with what is known of it; `advance` is told the bytes read."""
    if source.folder.suffix == GGUF:
        return [_check(source.folder.with_name(name), file, advance) for name, file in sorted(files.items())]
    checked = [_check(source.folder / name, file, advance) for name, file in sorted(files.items())]
    others = sorted(p for p in source.folder.iterdir() if p.is_file() and p.name not in files and p.name != RECORD)
    return [*checked, *(CheckedFile(path.name, file_bytes(path), "unrecorded") for path in others)]


def _check(path: Path, file: HubFile, advance: Callable[[float], None]) -> CheckedFile:
    if not path.is_file():
        return CheckedFile(file.name, 0, "missing")
    size = file_bytes(path)
    if size != file.size:
        return CheckedFile(file.name, size, "damaged")
    digest = hasher(file)
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            advance(len(block))
    return CheckedFile(file.name, size, "ok" if digest.hexdigest() == file.digest else "damaged")


def drop_damaged(source: Source, checked: list[CheckedFile]) -> list[str]:
    """Delete the damaged files of a snapshot in the cache, so that the next pull fetches them; returns their names.

    Raises UsageError for a model that no pull can bring back.
    """
    damaged = [file.name for file in checked if file.state == "damaged"]
    folder = source.folder.parent if source.folder.suffix == GGUF else source.folder
    if damaged and folder.parent.name != "snapshots":
        raise UsageError(f"{source.name}: only files that came from a hub can be fetched again", "quantize it again")
    for name in damaged:
        path = folder / name
        Path(os.path.realpath(path)).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    return damaged
