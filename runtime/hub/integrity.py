"""Verifies the files of a stored model by size and hash, without a network.

The expected hashes come from mycli.json (a quantized model), the commit's record in `trees/`, the name of the blob
that a cached file links to, or the name of a file of Ollama's.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mycli.runtime.checkpoint.gguf_parts import blob_digest, is_gguf, part_names
from mycli.runtime.checkpoint.sentence_transformers import MODULE_FILE
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.hub import store
from mycli.runtime.hub.names import is_hub_name, split_file, split_name
from mycli.runtime.hub.resolve import Source, resolve
from mycli.runtime.hub.store import COMMIT, DIGEST, MAX_RECORD_BYTES, RECORD, HubFile
from mycli.runtime.tokenizer.chat_template import TEMPLATE_FILE
from mycli.runtime.utils.json_fields import read_object

_CHUNK = 1 << 20


@dataclass(frozen=True)
class CheckedFile:
    """The result for one file; "unrecorded": no hash is known for it."""

    name: str
    nbytes: int
    state: Literal["ok", "damaged", "missing", "unrecorded"]


def find_local(model: str) -> Source:
    """Return what `resolve` returns, but also a cached model with missing files, for `verify_files` to name them."""
    try:
        return resolve(model)
    except (NotFoundError, ModelError):
        if not is_hub_name(model):
            raise
        repo, revision = split_name(model)
        commit = store.read_ref(store.repo_folder(repo), revision or "main")
        snapshot = store.repo_folder(repo) / "snapshots" / (commit or "none")
        if not snapshot.is_dir():
            raise
        return Source(model, snapshot / (split_file(model)[1] or ""), repo, commit)


def _folder(source: Source) -> Path:
    if not is_gguf(source.folder):
        return source.folder
    # A GGUF file of a repository may lie in a folder of the snapshot.
    return next(filter(_is_snapshot, source.folder.parents), source.folder.parent)


def _is_snapshot(folder: Path) -> bool:
    return folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) is not None


def _record(source: Source) -> Path:
    return store.gguf_record(source.folder) if is_gguf(source.folder) else source.folder / RECORD


def has_record(source: Source) -> bool:
    """Whether `quantize` or `export` recorded hashes of the model's files next to them."""
    return _record(source).is_file()


def files_to_verify(source: Source) -> dict[str, HubFile]:
    """Return the expected size and hash of each file, by name. Raises ModelError if none are known."""
    folder = _folder(source)
    if _is_snapshot(folder):
        files = _cached_files(folder)
        if folder == source.folder:
            return files
        names = part_names(source.folder.relative_to(folder).as_posix())
        return {name: files.get(name, HubFile(name, 0, "0" * 64)) for name in names}
    if (digest := blob_digest(source.folder)) is not None:
        blobs = {source.folder: digest}
        if source.adapter is not None and (added := blob_digest(source.adapter)) is not None:
            blobs[source.adapter] = added
        return {path.name: HubFile(path.name, store.file_bytes(path), digest) for path, digest in blobs.items()}
    record = _record(source)
    if not record.exists():
        problem = f"{source.folder}: no {record.name} with the hashes of its files, as quantize writes it"
        raise ModelError(problem, code="no-hashes")
    entries = read_object(record, MAX_RECORD_BYTES).object("files")
    files = {}
    for name in entries.values:
        entry = entries.object(name)
        digest = entry.text("sha256")
        # A record may name a path, as `../../x`; only files of the folder are read, and known ones below it.
        plain = "/" not in name and name not in ("", ".", "..")
        if not re.fullmatch(r"[0-9a-f]{64}", digest) or not (
            plain or MODULE_FILE.fullmatch(name) or TEMPLATE_FILE.fullmatch(name)
        ):
            raise entry.fail("sha256", "is not the sha256 of a file in the same folder")
        files[name] = HubFile(name, entry.integer("bytes", low=0, high=1 << 60), digest)
    return files


def _cached_files(snapshot: Path) -> dict[str, HubFile]:
    tree = {file.name: file for file in store.read_tree(snapshot.parent.parent, snapshot.name) or ()}
    files = {}
    for path in snapshot.rglob("*"):
        name = path.relative_to(snapshot).as_posix()
        if name in tree:
            files[name] = tree[name]
        elif path.is_symlink() and DIGEST.fullmatch(path.readlink().name):
            files[name] = HubFile(name, store.file_bytes(path), path.readlink().name)
    with suppress(ModelError):  # a damaged index: its own hash shows it
        for name in store.missing_files(snapshot, tree.values()):
            files.setdefault(name, tree.get(name, HubFile(name, 0, "0" * 64)))
    return files


def verify_files(source: Source, files: dict[str, HubFile], advance: Callable[[float], None]) -> list[CheckedFile]:
    """Compare each file with its expected size and hash. `advance` receives the number of bytes read."""
    folder = _folder(source)
    checked = [_check(folder / name, file, advance) for name, file in sorted(files.items())]
    if folder != source.folder:
        # Other files next to a GGUF file are other models.
        return checked
    others = sorted(p for p in folder.iterdir() if p.is_file() and p.name not in files and p.name != RECORD)
    return [*checked, *(CheckedFile(path.name, store.file_bytes(path), "unrecorded") for path in others)]


def _check(path: Path, file: HubFile, advance: Callable[[float], None]) -> CheckedFile:
    if not path.is_file():
        return CheckedFile(file.name, 0, "missing")
    size = store.file_bytes(path)
    if size != file.size:
        return CheckedFile(file.name, size, "damaged")
    digest = file.hasher()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return CheckedFile(file.name, size, "ok" if digest.hexdigest() == file.digest else "damaged")


def drop_damaged(source: Source, checked: list[CheckedFile]) -> list[str]:
    """Delete the damaged files of a cached model, so that the next pull fetches them, and return their names.

    Raises UsageError for a model that did not come from a hub.
    """
    damaged = [file.name for file in checked if file.state == "damaged"]
    folder = _folder(source)
    if damaged and folder.parent.name != "snapshots":
        again = "quantize it again" if blob_digest(source.folder) is None else "ollama pull the model again"
        raise UsageError(f"{source.name}: only files that came from a hub can be fetched again", again)
    blobs = Path(os.path.realpath(folder.parent.parent / "blobs"))
    for name in damaged:
        path = folder / name
        # A link may lead anywhere: only blobs of this model are deleted with it.
        target = Path(os.path.realpath(path))
        if target.parent == blobs:
            target.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    return damaged
