"""From the hub into the Hugging Face cache: what is wanted of a repository, fetched, verified and put in its place.

Writes the cache as huggingface_hub lays it out, with three differences in how: a file that broke off is kept and goes
on in any later process, every byte is checked against size *and* hash before it gets its name, and the branch points
to the new commit only when all of its files are there. Never opens anything but safetensors, GGUF, JSON and templates.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mycli.runtime.checkpoint.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from mycli.runtime.checkpoint.gguf.files import part_names
from mycli.runtime.checkpoint.safetensors_header import INDEX, SINGLE
from mycli.runtime.errors import GateError, ModelError, NotFoundError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.names import safe_name, split_file, split_name
from mycli.runtime.hub.partial_file import PartialFile, hasher
from mycli.runtime.hub.resolve import Source
from mycli.runtime.hub.store import (
    MAX_INDEX_BYTES,
    HubFile,
    file_bytes,
    gguf_files,
    holds_adapter,
    parse_tree,
    read_shards,
    repo_folder,
)
from mycli.runtime.utils.files import locked, require_space, write_atomic
from mycli.runtime.utils.json_fields import Fields, parse_object
from mycli.runtime.utils.units import human_bytes

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack")


@dataclass(frozen=True)
class Download:
    """What one download will do: `files` are the wanted ones of `commit`, `missing` those not in the cache yet.

    `new_bytes` have to come over the network; what an earlier attempt left is not counted again. `tree` is the record
    of all files of the commit.
    """

    model: str
    repo: str
    revision: str
    commit: str
    tree: Fields
    files: tuple[HubFile, ...]
    missing: tuple[HubFile, ...]
    new_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Of all wanted files."""
        return sum(file.size for file in self.files)


def plan_files(
    hub: Hub, model: str, repo: str, revision: str | None, choose: Callable[[str, tuple[HubFile, ...]], list[HubFile]]
) -> Download:
    """What bringing the files that `choose` takes, of the commit and all that it holds, means for the cache.

    The revision becomes one commit here; all files are of that commit, whatever happens to the branch meanwhile.
    """
    commit = hub.commit(repo, revision)
    tree = hub.tree(repo, commit)
    files = tuple(choose(commit, parse_tree(tree)))
    missing = tuple(file for file in files if _find_blob(repo, file) is None)
    # Files of the same contents share one blob.
    new_bytes = sum(_bytes_left(repo, file) for file in {file.digest: file for file in missing}.values())
    return Download(model, repo, revision or "main", commit, tree, files, missing, new_bytes)


def plan_download(hub: Hub, model: str) -> Download:
    """Ask the hub what a download of `org/repo[@revision]` means, and compare with the cache. Writes nothing.

    Raises UsageError, NotFoundError (each failure of network and access in its own words), and ModelError where there
    are no safetensors.
    """
    repo, revision = split_name(model)
    single = split_file(model)[1]
    if single is not None:
        return plan_files(hub, model, repo, revision, lambda _, files: _select_gguf(repo, single, files))
    job = plan_files(hub, model, repo, revision, partial(_select, hub, repo))
    if holds_adapter(file.name for file in job.files):
        return job
    lacking = {
        "config.json": "it cannot be used as a model",
        "tokenizer.json": "it can be measured, but not given text",
    }
    for file in job.files:
        lacking.pop(file.name, None)
    return replace(job, warnings=tuple(f"{repo} has no {name}: {without}" for name, without in lacking.items()))


def _select(hub: Hub, repo: str, commit: str, files: Iterable[HubFile]) -> list[HubFile]:
    root = {file.name: file for file in files if safe_name(file.name)}
    small = [f for f in root.values() if f.name.endswith((".json", ".jinja")) and not f.name.endswith(".index.json")]
    if INDEX in root:
        shards = read_shards(parse_object(read_small(hub, repo, commit, root[INDEX]), INDEX, MAX_INDEX_BYTES))
        absent = [name for name in shards if name not in root]
        if absent:
            raise ModelError(f"{INDEX}: names {absent[0]}, which {repo} does not hold", "the repository is incomplete")
        return [*small, root[INDEX], *(root[name] for name in shards)]
    if SINGLE in root:
        return [*small, root[SINGLE]]
    if ADAPTER_CONFIG in root and ADAPTER_WEIGHTS in root:
        return [root[ADAPTER_CONFIG], root[ADAPTER_WEIGHTS]]
    quantized = gguf_files(root)
    if quantized:
        shown = ", ".join(f"{repo}:{name}" for name in quantized[:6])
        more = f" and {len(quantized) - 6} more" if quantized[6:] else ""
        raise ModelError(f"{repo}: no safetensors but GGUF files, each a model", f"give one: {shown}{more}")
    others = sorted(f.name for f in files if f.name.endswith((*_PICKLED, ".gguf", ".safetensors")))
    held = f"only {others[0]}" if others else "nor in a GGUF file"
    hint = "look for a model in this format with: https://huggingface.co/models?library=safetensors"
    if any(name.endswith(_PICKLED) for name in others):
        held += ", whose format can run code when opened and is never read here"
        hint = "https://huggingface.co/spaces/safetensors/convert makes a safetensors version of a repository"
    raise ModelError(f"{repo}: no weights in {SINGLE} or {INDEX}, {held}", hint)


def _select_gguf(repo: str, file: str, files: Iterable[HubFile]) -> list[HubFile]:
    """A GGUF model is its file, or its parts: nothing else of the repository is wanted."""
    root = {held.name: held for held in files if safe_name(held.name)}
    names = part_names(file)
    absent = [name for name in names if name not in root]
    if absent:
        held = gguf_files(root)
        hint = f"it holds {', '.join(held[:8])}" if held else "it holds no GGUF file"
        raise NotFoundError(f"{repo} has no file {absent[0]}", hint)
    return [root[name] for name in names]


def read_small(hub: Hub, repo: str, commit: str, file: HubFile) -> bytes:
    """A small file as a whole, from the cache or over the network, its hash checked; nothing is written.

    Raises ModelError for one that is not small, GateError for one that does not match its hash.
    """
    blob = _find_blob(repo, file)
    if blob is not None:
        return blob.read_bytes()
    if file.size > MAX_INDEX_BYTES:
        raise ModelError(
            f"{file.name}: {human_bytes(file.size)}, more than the {human_bytes(MAX_INDEX_BYTES)} allowed",
            "this is not a model",
        )
    data = hub.read(repo, commit, file.name, 0, max(file.size, 1))
    digest = hasher(file)
    digest.update(data)
    if digest.hexdigest() != file.digest:
        raise _altered(repo, file)
    return data


def _blob(repo: str, file: HubFile) -> Path:
    return repo_folder(repo) / "blobs" / file.digest


def _find_blob(repo: str, file: HubFile) -> Path | None:
    path = _blob(repo, file)
    return path if os.path.exists(path) and file_bytes(path) == file.size else None


def _partial(repo: str, file: HubFile) -> Path:
    return _blob(repo, file).with_name(f"{file.digest}.mycli.incomplete")


def _bytes_left(repo: str, file: HubFile) -> int:
    arrived = file_bytes(_partial(repo, file))
    return file.size - arrived if arrived <= file.size else file.size


def lock_folder(folder: Path) -> Path:
    """Where the locks of a repository's cache `folder` lie: those of this program, and huggingface_hub's."""
    return folder.parent / ".locks" / folder.name


def repo_lock(folder: Path, what: str, note: Callable[[str], None]) -> AbstractContextManager[None]:
    """Alone among the processes of this machine with a repository of the cache; whoever waits says for whom."""
    path = lock_folder(folder) / "mycli.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return locked(path, lambda holder: note(f"{what} is being fetched by process {holder}: waiting for it"))


def check_space(job: Download) -> None:
    """Raises ResourceError where the disk seems too small for what `job` would bring."""
    require_space(repo_folder(job.repo), job.new_bytes, code="cache-full")


def fetch_files(hub: Hub, job: Download, *, force: bool, advance: Callable[[float], None]) -> Source:
    """Do what was planned; `advance` is told of bytes as they come (negative: some were thrown away).

    `force` skips the check of free space. Interrupted at any point, what has arrived is used by the next attempt.
    Another process that fetches the same model is waited for, and what it brought is used. Raises what `plan_download`
    raises, ResourceError for a full disk, and GateError for contents that stay different from their hash.
    """
    folder = repo_folder(job.repo)
    snapshot = folder / "snapshots" / job.commit
    source = Source(job.model, snapshot / _first_file(job.model), job.repo, job.commit)
    if not job.missing and all((snapshot / file.name).exists() for file in job.files):
        with suppress(OSError):  # a read-only cache that holds everything is fine
            _write_ref(folder, job)
        return source
    if not force:
        check_space(job)
    for part in (folder / "blobs", folder / "trees", snapshot):
        part.mkdir(parents=True, exist_ok=True)
    with repo_lock(folder, job.model, hub.note):
        record = {"format_version": 1, "files": dict(sorted(job.tree.values.items()))}
        write_atomic(folder / "trees" / f"{job.commit}.json", json.dumps(record, indent=1).encode())
        for file in job.files:
            if _find_blob(job.repo, file) is None:
                _fetch(hub, job, file, advance)
            elif file in job.missing:
                advance(_bytes_left(job.repo, file))  # brought by another process meanwhile
            _link(snapshot / file.name, _blob(job.repo, file))
        _write_ref(folder, job)
    return source


def _first_file(model: str) -> str:
    """The file that a model's name names, which stands for the model; "" where its folder does."""
    return split_file(model)[1] or ""


def _fetch(hub: Hub, job: Download, file: HubFile, advance: Callable[[float], None]) -> None:
    arriving = _partial(job.repo, file)
    for _ in range(2):
        if _receive(hub, job, file, advance):
            try:
                os.replace(arriving, _blob(job.repo, file))
            except FileNotFoundError:  # locks do not work here, and another process has placed the same bytes
                if _find_blob(job.repo, file) is None:
                    raise
            return
        arriving.unlink(missing_ok=True)
        advance(-file.size)
        hub.note(f"{file.name}: what arrived does not match its hash, and was discarded")
    raise _altered(job.repo, file)


def _receive(hub: Hub, job: Download, file: HubFile, advance: Callable[[float], None]) -> bool:
    with PartialFile(_partial(job.repo, file), file, advance) as part:
        hub.policy.run(lambda: part.receive(hub, job.repo, job.commit), hub.note, lambda: part.done)
        return part.finish()


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
    fresh = pointer.with_name(f".{pointer.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    os.replace(fresh, pointer)


def _write_ref(folder: Path, job: Download) -> None:
    path = folder / "refs" / job.revision
    if job.revision != job.commit and (not path.exists() or path.read_text(encoding="utf-8") != job.commit):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, job.commit.encode())
