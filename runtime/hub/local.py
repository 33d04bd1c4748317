"""What is stored on this machine: listing it, with what is wrong with it, and removing it.

Knows the two places of models, the Hugging Face cache and $MYCLI_HOME. Uses no network, and of weights reads headers.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mycli.runtime.checkpoint.adapter_config import ADAPTER_CONFIG, AdapterConfig, is_adapter
from mycli.runtime.checkpoint.gguf.files import part_names
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.hub.download import lock_folder, repo_lock
from mycli.runtime.hub.names import is_hub_name, is_path, split_name
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.hub.store import (
    BUILT_IN,
    HubFile,
    built_in_folder,
    cached_repos,
    commits,
    data_dir,
    file_bytes,
    gguf_files,
    holds_adapter,
    hub_cache,
    missing_files,
    read_ref,
    read_tree,
    repo_folder,
    stored,
)
from mycli.runtime.utils.json_fields import read_object

Kind = Literal["built-in", "quantized", "hub", "adapter"]


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


def local_models() -> list[LocalModel]:
    """All models on this machine, usable or not, by kind and name."""
    built_in = [LocalModel(p.name, "built-in", p, None, _size([p]), "") for p in map(built_in_folder, BUILT_IN)]
    folders = [data_dir() / "models" / name for name in stored()]
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
            open_model_folder(snapshot / file).checked_manifest()
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
        opened = open_model_folder(folder)
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
        target = data_dir() / "models" / model
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
    if folder.parent == data_dir() / "models":
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
