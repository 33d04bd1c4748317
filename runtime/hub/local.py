"""What is stored on this machine: listing it, checking it byte by byte, and removing it.

Knows the two places of models, the Hugging Face cache and $MYCLI_HOME. Uses no network, and opens no weights except to
hash them.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mycli.runtime.checkpoint.adapter_config import ADAPTER_CONFIG, AdapterConfig, is_adapter
from mycli.runtime.checkpoint.gguf.files import part_names
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.hub.download import lock_folder, repo_lock
from mycli.runtime.hub.names import GGUF, is_hub_name, is_path, split_file, split_name
from mycli.runtime.hub.partial_file import hasher
from mycli.runtime.hub.resolve import (
    BUILT_IN,
    COMMIT,
    DIGEST,
    RECORD,
    HubFile,
    Source,
    built_in_folder,
    cached_repos,
    commits,
    file_bytes,
    gguf_files,
    holds_adapter,
    home,
    hub_cache,
    missing_files,
    read_ref,
    read_tree,
    repo_folder,
    resolve,
    stored,
)
from mycli.runtime.utils.json_fields import read_object

MAX_RECORD_BYTES = 16 << 20
_BLOCK = 1 << 20

Kind = Literal["built-in", "quantized", "hub", "adapter"]
State = Literal["ok", "damaged", "missing", "unrecorded"]


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine. `problem` is empty when it can be used; `nbytes` counts what its files take on disk."""

    name: str
    kind: Kind
    folder: Path
    commit: str | None
    nbytes: int
    problem: str


@dataclass(frozen=True)
class Removal:
    """What `remove` would delete. `commits` empty: the whole of `folder`, with everything unfinished in it."""

    name: str
    folder: Path
    commits: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class CheckedFile:
    """One file after `verify_files`; `state` "unrecorded": nothing says what its contents should be."""

    name: str
    nbytes: int
    state: State


def local_models() -> list[LocalModel]:
    """All models on this machine, usable or not, by kind and name."""
    built_in = [LocalModel(p.name, "built-in", p, None, _size([p]), "") for p in map(built_in_folder, BUILT_IN)]
    folders = [home() / "models" / name for name in stored()]
    here = [LocalModel(p.name, "quantized", p, None, _size([p]), _problem(p)) for p in folders]
    return [*built_in, *here, *(model for repo in cached_repos() for model in _cached_models(repo))]


def _cached_models(repo: str) -> Iterator[LocalModel]:
    folder = repo_folder(repo)
    for commit, names in commits(folder).items():
        name = repo if "main" in names else f"{repo}@{next(iter(names), commit)}"
        snapshot = folder / "snapshots" / commit
        yield from _gguf_models(name, snapshot, commit)
        if gguf_files(path.name for path in snapshot.glob("*")) and not (snapshot / "config.json").exists():
            continue  # of such a repository only files are models
        tree = read_tree(folder, commit)
        kind: Kind = "adapter" if holds_adapter(file.name for file in tree or ()) or is_adapter(snapshot) else "hub"
        problem = _adapter_problem(snapshot) if kind == "adapter" else _problem(snapshot, tree)
        unfinished = sum(file_bytes(path) for path in (folder / "blobs").glob("*.incomplete")) if problem else 0
        yield LocalModel(name, kind, snapshot, commit, _size([snapshot]) + unfinished, problem)


def _gguf_models(name: str, snapshot: Path, commit: str) -> Iterator[LocalModel]:
    for file in gguf_files(path.name for path in snapshot.glob("*")):
        parts = [snapshot / part for part in part_names(file)]
        problem = ""
        try:
            ModelFolder.open(snapshot / file).checked_manifest()
        except (ModelError, NotFoundError) as error:
            problem = error.message
        yield LocalModel(f"{name}:{file}", "hub", snapshot / file, commit, sum(map(file_bytes, parts)), problem)


def _problem(folder: Path, tree: tuple[HubFile, ...] | None = None) -> str:
    """Why the model in `folder` cannot be used; nothing where it can. Looks into config.json and the headers."""
    names = [file.name for file in tree or ()] + [path.name for path in folder.glob("*.safetensors")]
    if not any(name.endswith(".safetensors") for name in names):
        return "no safetensors"
    try:
        missing = missing_files(folder, tree)
        if missing:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            return f"incomplete: {missing[0]} missing{more}"
        opened = ModelFolder.open(folder)
    except ModelError as error:
        return f"{'damaged' if error.code else 'unsupported'}: {error.message}"
    try:
        opened.checked_manifest()
    except ModelError as error:
        return f"damaged: {error.message}"
    return _tokenizer_problem(folder / "tokenizer.json")


def _adapter_problem(folder: Path) -> str:
    """Why the adapter in `folder` cannot be used, whatever the model; nothing where it can."""
    missing = missing_files(folder, None) if is_adapter(folder) else [ADAPTER_CONFIG]
    if missing:
        return f"incomplete: {missing[0]} missing"
    try:
        AdapterConfig.parse(read_object(folder / ADAPTER_CONFIG))
    except ModelError as error:
        return f"{'damaged' if error.code else 'unsupported'}: {error.message}"
    return ""


def _tokenizer_problem(path: Path) -> str:
    """Without parsing it, which takes longer than all else: a truncated file does not end as an object does."""
    if not path.is_file():
        return "no tokenizer.json: it can be measured, but not given text"
    with path.open("rb") as file:
        file.seek(max(0, file_bytes(path) - 64))
        whole = file.read().rstrip().endswith(b"}")
    return "" if whole else "damaged: tokenizer.json is cut off"


def _real_files(folders: Iterable[Path]) -> set[str]:
    return {os.path.realpath(path) for folder in folders for path in folder.rglob("*") if path.is_file()}


def _size(folders: Iterable[Path], without: Iterable[Path] = ()) -> int:
    return sum(file_bytes(Path(path)) for path in _real_files(folders) - _real_files(without))


def plan_removal(model: str) -> Removal:
    """What removing `model` would delete: a model quantized here, a repository of the cache, or one revision of it.

    Raises UsageError for anything that mycli did not store, NotFoundError for what is not there.
    """
    if model in BUILT_IN:
        raise UsageError(f"{model} is part of mycli", "it is removed when mycli is uninstalled")
    if model in stored():
        target = home() / "models" / model
        return Removal(model, target, (), _size([target]))
    foreign = UsageError(
        f"{model}: only what mycli stored can be removed by name", code="remove-by-hand", data={"model": model}
    )
    if not is_hub_name(model):
        if not is_path(model) and "/" not in model and not Path(model).exists():
            resolve(model)  # says which names are close
        raise foreign
    repo, revision = split_name(model)
    folder = repo_folder(repo)
    if not folder.is_dir():
        resolve(model)
        raise foreign
    if revision is None:
        return Removal(repo, folder, (), _size([folder]))
    held, commit = commits(folder), read_ref(folder, revision)
    if commit is None or commit not in held:
        raise NotFoundError(f"{model} is not on this machine", code="list-models")
    others = [folder / "snapshots" / other for other in held if other != commit]
    return Removal(model, folder, (commit,), _size([folder / "snapshots" / commit], without=others))


def remove(removal: Removal, note: Callable[[str], None]) -> None:
    """Delete what `plan_removal` found; a download of it that is running is waited for.

    Blobs that other revisions, or through the cache's shared store other repositories, use are kept.
    """
    folder = removal.folder
    if folder.parent == home() / "models":
        _delete_folder(folder)
        return
    with repo_lock(folder, removal.name, note):
        import huggingface_hub

        scanned = huggingface_hub.scan_cache_dir(hub_cache())
        known = {r.commit_hash for repo in scanned.repos if repo.repo_path == folder for r in repo.revisions}
        wanted = set(removal.commits) or set(commits(folder))
        scanned.delete_revisions(*(wanted & known)).execute()
        for commit in wanted:
            if (snapshot := folder / "snapshots" / commit).exists():
                shutil.rmtree(snapshot)  # the library only logs what it could not delete; this says why
            (folder / "trees" / f"{commit}.json").unlink(missing_ok=True)
        if not removal.commits:
            _delete_folder(folder)
    if not removal.commits:
        shutil.rmtree(lock_folder(folder), ignore_errors=True)


def _delete_folder(folder: Path) -> None:
    """All or nothing to whoever looks: the folder leaves its name before its files go."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        leaving = folder.with_name(f".removed-{os.getpid()}-{folder.name}")
        folder.rename(leaving)
        shutil.rmtree(leaving)


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
