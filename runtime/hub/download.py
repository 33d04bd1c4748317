"""From the hub into the Hugging Face cache: what is wanted of a repository, fetched, verified and put in its place.

Writes the cache as huggingface_hub lays it out, with three differences in how: a file that broke off is kept and goes
on in any later process, every byte is checked against size *and* hash before it gets its name, and the branch points
to the new commit only when all of its files are there. Never opens anything but safetensors, JSON and templates.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mycli.runtime.errors import GateError, ModelError, ResourceError
from mycli.runtime.hub.client import Hub, TreeEntry
from mycli.runtime.hub.partial_file import Writer, exclusive, hasher
from mycli.runtime.hub.resolve import (
    COMMIT,
    INDEX,
    MAX_INDEX_BYTES,
    SINGLE,
    HubFile,
    Source,
    cache,
    read_shards,
    repo_folder,
    safe_name,
    split_name,
)
from mycli.runtime.hub.retry import persist
from mycli.runtime.utils.json_fields import parse_object

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack")


@dataclass(frozen=True)
class Pull:
    """What one download will do: `files` are the wanted ones of `commit`, `missing` those not in the cache yet.

    `new_bytes` have to come over the network; what an earlier attempt left is not counted again.
    """

    model: str
    repo: str
    revision: str
    commit: str
    files: tuple[HubFile, ...]
    missing: tuple[HubFile, ...]
    new_bytes: int
    warnings: tuple[str, ...]
    records: tuple[TreeEntry, ...]

    @property
    def total_bytes(self) -> int:
        """Of all wanted files."""
        return sum(file.size for file in self.files)


def _select(repo: str, files: Iterable[HubFile], read_index: Callable[[HubFile], bytes]) -> list[HubFile]:
    root = {file.name: file for file in files if safe_name(file.name)}
    small = [f for f in root.values() if f.name.endswith((".json", ".jinja")) and not f.name.endswith(".index.json")]
    if INDEX in root:
        shards: Sequence[str] = read_shards(parse_object(read_index(root[INDEX]), INDEX, MAX_INDEX_BYTES))
        absent = [name for name in shards if name not in root]
        if absent:
            raise ModelError(f"{INDEX}: names {absent[0]}, which {repo} does not hold", "the repository is incomplete")
        return [*small, root[INDEX], *(root[name] for name in shards)]
    if SINGLE in root:
        return [*small, root[SINGLE]]
    others = sorted(f.name for f in files if f.name.endswith((*_PICKLED, ".gguf", ".safetensors")))
    held = f"only {others[0]}" if others else "none"
    hint = "look for a model in this format with: https://huggingface.co/models?library=safetensors"
    if any(name.endswith(_PICKLED) for name in others):
        held += ", whose format can run code when opened and is never read here"
        hint = "https://huggingface.co/spaces/safetensors/convert makes a safetensors version of a repository"
    raise ModelError(f"{repo}: no weights in {SINGLE} or {INDEX}, {held}", hint)


def plan(hub: Hub, model: str) -> Pull:
    """Ask the hub what a download of `org/repo[@revision]` means, and compare with the cache. Writes nothing.

    The revision becomes one commit here; all files are of that commit, whatever happens to the branch meanwhile.
    Raises UsageError, NotFoundError (each failure of network and access in its own words), and ModelError where there
    are no safetensors.
    """
    repo, revision = split_name(model)
    revision = revision or "main"
    commit = revision if COMMIT.fullmatch(revision) else hub.commit(repo, revision)
    records = hub.tree(repo, commit)

    files = _select(repo, [entry.file for entry in records], partial(read_small, hub, repo, commit))
    names = {file.name for file in files}
    warnings = [
        f"{repo} has no {name}: {without}"
        for name, without in (
            ("config.json", "it cannot be used as a model"),
            ("tokenizer.json", "it can be measured, but not given text"),
        )
        if name not in names
    ]
    missing, new_bytes = missing_of(repo, files)
    return Pull(model, repo, revision, commit, tuple(files), missing, new_bytes, tuple(warnings), tuple(records))


def missing_of(repo: str, files: Iterable[HubFile]) -> tuple[tuple[HubFile, ...], int]:
    """Those that the cache does not hold, and the bytes that have to come for them."""
    missing = tuple(file for file in files if _stored(repo, file) is None)
    # Files of the same contents share one blob.
    return missing, sum(_left(repo, file) for file in {file.digest: file for file in missing}.values())


def read_small(hub: Hub, repo: str, commit: str, file: HubFile) -> bytes:
    """A small file as a whole, from the cache or over the network, its hash checked; nothing is written.

    Raises ModelError for one that is not small, GateError for one that does not match its hash.
    """
    stored = _stored(repo, file)
    if stored is not None:
        return stored.read_bytes()
    if file.size > MAX_INDEX_BYTES:
        raise ModelError(f"{file.name}: {file.size} bytes, more than the {MAX_INDEX_BYTES} allowed", "")
    data = hub.read(repo, commit, file.name, 0, max(file.size, 1))
    digest = hasher(file)
    digest.update(data)
    if digest.hexdigest() != file.digest:
        raise _altered(repo, file)
    return data


def _blobs(repo: str) -> Path:
    return repo_folder(repo) / "blobs"


def _stored(repo: str, file: HubFile) -> Path | None:
    path = _blobs(repo) / file.digest
    try:
        return path if path.stat().st_size == file.size else None
    except OSError:
        return None


def _partial(repo: str, file: HubFile) -> Path:
    return _blobs(repo) / f"{file.digest}.mycli.incomplete"


def _left(repo: str, file: HubFile) -> int:
    with suppress(OSError):
        size = _partial(repo, file).stat().st_size
        return file.size - size if size <= file.size else file.size
    return file.size


def require_space(needed: int, folder: Path) -> None:
    """Raise ResourceError with both numbers unless `needed` bytes are free where `folder` is, or will be."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"{folder}: {needed} bytes are needed and {free} are free ({needed - free} too few)",
            "mycli rm MODEL frees space, HF_HUB_CACHE names another disk, --force tries nevertheless",
        )


def pull(hub: Hub, job: Pull, *, force: bool, advance: Callable[[float], None]) -> Source:
    """Do what `plan` said; `advance` is told of bytes as they come (negative: some were thrown away).

    `force` skips the check of free space. Interrupted at any point, what has arrived is used by the next attempt.
    Another process that fetches the same model is waited for, and what it brought is used. Raises what `plan` raises,
    ResourceError for a full disk, and GateError for contents that stay different from their hash.
    """
    folder = repo_folder(job.repo)
    snapshot = folder / "snapshots" / job.commit
    complete = not job.missing and all((snapshot / file.name).exists() for file in job.files)
    if not complete:
        if not force:
            require_space(job.new_bytes, folder)
        for part in (folder / "blobs", folder / "trees", snapshot):
            part.mkdir(parents=True, exist_ok=True)
        with exclusive(cache() / ".locks" / folder.name / "mycli.lock", job.model, hub.note):
            _write_record(folder / "trees" / f"{job.commit}.json", job.records)
            for file in job.files:
                if _stored(job.repo, file) is None:
                    _fetch(hub, job, file, advance)
                elif file in job.missing:
                    advance(_left(job.repo, file))  # brought by another process meanwhile
                _link(snapshot / file.name, folder / "blobs" / file.digest)
            _write_ref(folder, job)
    else:
        with suppress(OSError):  # a read-only cache that holds everything is fine
            _write_ref(folder, job)
    return Source(job.model, snapshot, job.repo, job.commit)


def _fetch(hub: Hub, job: Pull, file: HubFile, advance: Callable[[float], None]) -> None:
    arriving = _partial(job.repo, file)
    for _ in range(2):
        if _receive(hub, job, file, advance):
            try:
                os.replace(arriving, _blobs(job.repo) / file.digest)
            except FileNotFoundError:  # locks do not work here, and another process has placed the same bytes
                if _stored(job.repo, file) is None:
                    raise
            return
        arriving.unlink(missing_ok=True)
        advance(-file.size)
        hub.note(f"{file.name}: what arrived does not match its hash, and was thrown away")
    raise _altered(job.repo, file)


def _receive(hub: Hub, job: Pull, file: HubFile, advance: Callable[[float], None]) -> bool:
    with Writer(_partial(job.repo, file), file, advance) as writer:
        persist(lambda: writer.receive(hub, job.repo, job.commit), hub.patience, hub.note, lambda: writer.done)
        return writer.finish()


def _altered(repo: str, file: HubFile) -> GateError:
    return GateError(
        f"{file.name}: what the server sends does not have the hash {file.digest} that {repo} records",
        "a proxy or a mirror may alter it: check HF_ENDPOINT and HTTPS_PROXY",
    )


def _link(pointer: Path, blob: Path) -> None:
    pointer.parent.mkdir(parents=True, exist_ok=True)
    target = Path(os.path.relpath(blob, pointer.parent))
    if pointer.is_symlink() and pointer.readlink() == target:
        return
    fresh = pointer.with_name(f".{pointer.name}.{os.getpid()}.tmp")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    os.replace(fresh, pointer)


def _write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def _write_record(path: Path, records: Sequence[TreeEntry]) -> None:
    files = {entry.file.name: entry.record for entry in sorted(records, key=lambda entry: entry.file.name)}
    _write_whole(path, json.dumps({"format_version": 1, "files": files}, indent=1))


def _write_ref(folder: Path, job: Pull) -> None:
    if job.revision == job.commit:
        return
    path = folder / "refs" / job.revision
    if not path.exists() or path.read_text(encoding="utf-8") != job.commit:
        _write_whole(path, job.commit)
