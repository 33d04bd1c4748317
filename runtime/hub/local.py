"""Lists the models on this machine, with the reason why one cannot be used, and removes them. No network."""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mycli.runtime.checkpoint.adapter_config import ADAPTER_CONFIG, AdapterConfig, is_adapter
from mycli.runtime.checkpoint.gguf_parts import part_names
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.hub import store
from mycli.runtime.hub.download import lock_folder, repo_lock
from mycli.runtime.hub.names import is_hub_name, is_path, split_file, split_name
from mycli.runtime.hub.other_stores import StoredModel, stored_models
from mycli.runtime.hub.resolve import Source, named_file, resolve
from mycli.runtime.hub.store import BUILT_IN, HubFile
from mycli.runtime.tokenizer.tekken import tokenizer_file
from mycli.runtime.utils.files import try_lock
from mycli.runtime.utils.json_fields import read_object
from mycli.runtime.utils.units import pluralize

Kind = Literal["built-in", "quantized", "hub", "adapter", "unfinished", "ollama", "lm-studio"]
# What interrupted commands leave: finished blocks, a folder that was written, measured, replaced or removed.
_UNFINISHED = re.compile(r"\.(.+\.work|.+\.(?:partial|replaced)-\d+-[0-9a-f]{12}|removed-\d+-.+)")


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine. problem: why it cannot be used, or ""; nbytes: size on disk."""

    name: str
    kind: Kind
    folder: Path
    commit: str | None
    nbytes: int
    problem: str


@dataclass(frozen=True)
class Removal:
    """A planned removal of the given commits, or of single `files` of one; with neither of the whole `folder`."""

    name: str
    folder: Path
    commits: tuple[str, ...]
    nbytes: int
    files: tuple[Path, ...] = ()


def local_models() -> list[LocalModel]:
    built_in = [LocalModel(p.name, "built-in", p, None, _size([p]), "") for p in map(store.built_in_folder, BUILT_IN)]
    folders = [store.data_dir() / "models" / name for name in store.model_folders()]
    quantized = [LocalModel(p.name, "quantized", p, None, _size([p]), _problem(p)) for p in folders]
    return [
        *built_in,
        *quantized,
        *_unfinished(),
        *(model for repo in store.cached_repos() for model in _cached_models(repo)),
        *map(_stored_model, stored_models()),
    ]


def _stored_model(stored: StoredModel) -> LocalModel:
    if not (problem := stored.problem):
        source = Source(stored.name, stored.path, adapter=stored.adapter)
        problem = _problem(stored.path) if stored.path.is_dir() else _open_problem(source)
    return LocalModel(stored.name, stored.program, stored.path, None, stored.nbytes, problem)


def _unfinished() -> Iterator[LocalModel]:
    for folder in sorted(store.list_folder(store.data_dir() / "models")):
        match = _UNFINISHED.fullmatch(folder.name)
        if match and folder.is_dir():
            blocks = len(store.list_folder(folder, "block-*.safetensors"))
            state = f"unfinished: {pluralize(blocks, 'finished block')}" if blocks else "unfinished"
            yield LocalModel(match[1], "unfinished", folder, None, _size([folder]), state)


def _cached_models(repo: str) -> Iterator[LocalModel]:
    folder = store.repo_folder(repo)
    for commit, refs in store.commits(folder).items():
        name = repo if "main" in refs else f"{repo}@{next(iter(refs), commit)}"
        snapshot = folder / "snapshots" / commit
        ggufs = store.gguf_files_in(snapshot)
        for file in ggufs:
            nbytes = sum(store.file_bytes(snapshot / part) for part in part_names(file))
            kind, problem = _gguf_kind(snapshot / file)
            yield LocalModel(f"{name}:{file}", kind, snapshot / file, commit, nbytes, problem)
        if ggufs and not (snapshot / "config.json").exists():
            continue  # only the files are models, not the folder
        tree = store.read_tree(folder, commit)
        adapter = is_adapter(snapshot) or store.has_adapter_files(file.name for file in tree or ())
        problem = _adapter_problem(snapshot) if adapter else _problem(snapshot, tree)
        unfinished = sum(store.file_bytes(path) for path in (folder / "blobs").glob("*.incomplete")) if problem else 0
        kind = "adapter" if adapter else "hub"
        yield LocalModel(name, kind, snapshot, commit, _size([snapshot]) + unfinished, problem)


def _gguf_kind(path: Path) -> tuple[Kind, str]:
    # Also returns the problem.
    try:
        open_model_folder(path).checked_manifest()
    except (ModelError, NotFoundError) as error:
        return ("adapter", "") if error.code == "give-adapter" else ("hub", error.message)
    return "hub", ""


def _open_problem(source: Source) -> str:
    try:
        source.open().checked_manifest()
    except (ModelError, NotFoundError) as error:
        return error.message
    return ""


def _problem(folder: Path, tree: tuple[HubFile, ...] | None = None) -> str:
    names = [file.name for file in tree or ()] + [path.name for path in folder.glob("*.safetensors")]
    if not any(name.endswith(".safetensors") for name in names):
        return "no safetensors"
    try:
        if missing := store.missing_files(folder, tree):
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            return f"incomplete: {missing[0]} missing{more}"
        open_model_folder(folder)
    except ModelError as error:
        return _refused(error)
    if damage := _open_problem(Source(folder.name, folder)):
        return f"damaged: {damage}"
    return _tokenizer_problem(tokenizer_file(folder))


def _adapter_problem(folder: Path) -> str:
    missing = store.missing_files(folder, None) if is_adapter(folder) else [ADAPTER_CONFIG]
    if missing:
        return f"incomplete: {missing[0]} missing"
    try:
        AdapterConfig.parse(read_object(folder / ADAPTER_CONFIG))
    except ModelError as error:
        return _refused(error)
    return ""


def _refused(error: ModelError) -> str:
    # An error with a remedy code is about the file's contents; one without is about a feature.
    return f"{'damaged' if error.code else 'unsupported'}: {error.message}"


def _tokenizer_problem(path: Path) -> str:
    if not path.is_file():
        return "no tokenizer.json: it can be measured, but not given text"
    # Not parsed: that takes longer than everything else here. A truncated file lacks the closing brace.
    with path.open("rb") as file:
        file.seek(max(0, store.file_bytes(path) - 64))
        complete = file.read().rstrip().endswith(b"}")
    return "" if complete else f"damaged: {path.name} is cut off"


def _real_files(folders: Iterable[Path]) -> set[str]:
    return {os.path.realpath(path) for folder in folders for path in folder.rglob("*") if path.is_file()}


def _size(folders: Iterable[Path], without: Iterable[Path] = ()) -> int:
    return sum(store.file_bytes(Path(path)) for path in _real_files(folders) - _real_files(without))


def plan_removal(model: str) -> Removal:
    """Return what removing a quantized model, a cached repository or one revision of it deletes.

    Raises UsageError for anything that mycli did not store, NotFoundError for an unknown name.
    """
    if model in BUILT_IN:
        raise UsageError(f"{model} is part of mycli", "it is removed when mycli is uninstalled")
    if model in store.model_folders():
        folder = store.data_dir() / "models" / model
        return Removal(model, folder, (), _size([folder]))
    if unfinished := next((entry for entry in _unfinished() if entry.name == model), None):
        if _in_use(unfinished.folder):
            raise UsageError(f"{model}: another process is using it", "wait for it")
        return Removal(model, unfinished.folder, (), unfinished.nbytes)
    not_stored = UsageError(
        f"{model}: only what mycli stored can be removed by name", code="remove-by-hand", data={"model": model}
    )
    if not is_hub_name(model):
        if not is_path(model) and "/" not in model and not Path(model).exists():
            _require_known(model)  # raises NotFoundError with similar names
        raise not_stored
    repo, revision = split_name(model)
    folder = store.repo_folder(repo)
    if not folder.is_dir():
        _require_known(model)
        raise not_stored
    named = model != f"{repo}@{revision}" and model != repo
    if revision is None and not named:
        return Removal(repo, folder, (), _size([folder]))
    cached, commit = store.commits(folder), store.read_ref(folder, revision or "main")
    if commit is None or commit not in cached:
        raise NotFoundError(f"{model} is not on this machine", code="list-models")
    if named and (removal := _file_removal(model, folder, folder / "snapshots" / commit)) is not None:
        return removal
    if revision is None and len(cached) == 1:
        return Removal(repo, folder, (), _size([folder]))
    others = [folder / "snapshots" / other for other in cached if other != commit]
    return Removal(model, folder, (commit,), _size([folder / "snapshots" / commit], without=others))


def _require_known(model: str) -> None:
    try:
        resolve(model)
    except NotFoundError as error:
        if error.code in ("hub-candidates", "search-hub", "pull", "pull-online"):  # a download is no way to remove it
            raise NotFoundError(error.message, code="list-models") from None
        raise


def _file_removal(model: str, folder: Path, snapshot: Path) -> Removal | None:
    # Other GGUF files of the repository are models of their own, and stay. None if `snapshot` holds nothing else.
    file = split_file(named_file(model))[1]
    files = tuple(path for name in part_names(file or "none") if os.path.lexists(path := snapshot / name))
    if file is None or not files:
        raise NotFoundError(f"{model} is not on this machine", code="list-models")
    if store.gguf_files_in(snapshot) == [file] and not (snapshot / "config.json").exists():
        return None
    others = {os.path.realpath(path) for path in (folder / "snapshots").rglob("*") if path not in files}
    nbytes = sum(store.file_bytes(Path(path)) for path in set(map(os.path.realpath, files)) - others)
    return Removal(model, folder, (), nbytes, files)


def _delete_files(removal: Removal) -> None:
    blobs = [Path(os.path.abspath(path.parent / path.readlink())) for path in removal.files if path.is_symlink()]
    for path in removal.files:
        path.unlink()
    links = [path for path in (removal.folder / "snapshots").rglob("*") if path.is_symlink()]
    used = {os.path.abspath(path.parent / path.readlink()) for path in links}
    for blob in blobs:
        if blob.parent == Path(os.path.abspath(removal.folder / "blobs")) and str(blob) not in used:
            blob.unlink(missing_ok=True)


def remove(removal: Removal, note: Callable[[str], None]) -> None:
    """Carry out a removal, after waiting for a running download of the model.

    huggingface_hub decides which blobs go: other revisions and, through its shared store, other repositories use them.
    """
    folder = removal.folder
    if folder.parent == store.data_dir() / "models":
        _delete_folder(folder)
        return
    with repo_lock(folder, removal.name, note):
        if removal.files:
            _delete_files(removal)
            return
        import huggingface_hub

        cache = huggingface_hub.scan_cache_dir(store.hub_cache())
        known = {r.commit_hash for repo in cache.repos if repo.repo_path == folder for r in repo.revisions}
        selected = set(removal.commits) or set(store.commits(folder))
        cache.delete_revisions(*(selected & known)).execute()
        for commit in selected:
            if (snapshot := folder / "snapshots" / commit).exists():
                # The library only logs what it could not delete; this raises.
                shutil.rmtree(snapshot)
            (folder / "trees" / f"{commit}.json").unlink(missing_ok=True)
        if not removal.commits:
            _delete_folder(folder)
    if not removal.commits:
        shutil.rmtree(lock_folder(folder), ignore_errors=True)


def _in_use(unfinished: Path) -> bool:
    # A live run holds the lock in its work folder, or next to the folder that it writes.
    for path in (unfinished / "lock", unfinished.with_name(f"{unfinished.name.rpartition('.')[0]}.lock")):
        if path.is_file():
            with path.open("rb") as file:
                if not try_lock(file.fileno()):
                    return True
    return False


def _delete_folder(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        # Renamed first: no process finds a half-deleted model under its name.
        renamed = folder.with_name(f".removed-{os.getpid()}-{folder.name}")
        folder.rename(renamed)
        shutil.rmtree(renamed)
