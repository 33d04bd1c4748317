"""Downloads files of one commit into the Hugging Face cache: chosen, fetched, verified, then linked.

The layout is huggingface_hub's; three things differ from its downloads: interrupted files resume in any later process,
every byte is checked by size and hash before the file gets its name, and the branch is updated last. Only safetensors,
GGUF, JSON and templates are fetched; pickles never are.
"""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mycli.runtime.checkpoint.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MLX_WEIGHTS
from mycli.runtime.checkpoint.gguf_parts import part_names
from mycli.runtime.checkpoint.safetensors_header import INDEX, SINGLE, index_counts
from mycli.runtime.checkpoint.sentence_transformers import MODULE_FILE, MODULES
from mycli.runtime.errors import GateError, ModelError, NotFoundError
from mycli.runtime.hub import store
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.names import choose_quant, safe_name, safe_path, split_file, split_name, split_quant
from mycli.runtime.hub.partial_file import PartialFile
from mycli.runtime.hub.resolve import Source
from mycli.runtime.hub.store import MAX_INDEX_BYTES, HubFile
from mycli.runtime.tokenizer.chat_template import TEMPLATE_FILE
from mycli.runtime.tokenizer.tekken import TEKKEN_FILE
from mycli.runtime.utils.files import disk_errors, locked, require_space, write_atomic
from mycli.runtime.utils.json_fields import Fields, parse_object
from mycli.runtime.utils.units import human_bytes

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
# Formats whose loaders can run code from the file.
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack")


@dataclass(frozen=True)
class DownloadPlan:
    """The download of a model: all its files at `commit`, and the files not in the cache (`missing`).

    new_bytes: bytes to receive, without those an earlier attempt left. tree: the record of all files of the commit.
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
        return sum(file.size for file in self.files)


def plan_files(
    hub: Hub, model: str, repo: str, revision: str | None, choose: Callable[[str, tuple[HubFile, ...]], list[HubFile]]
) -> DownloadPlan:
    """Return the plan for the files that `choose(commit, files)` selects. Writes nothing."""
    # The revision is resolved once: a branch that moves during the download changes nothing.
    commit = hub.commit(repo, revision)
    tree = hub.tree(repo, commit)
    files = tuple(choose(commit, store.parse_tree(tree)))
    missing = tuple(file for file in files if _find_stored(repo, commit, file) is None)
    new_bytes = sum(_bytes_left(repo, file) for file in {file.digest: file for file in missing}.values())
    return DownloadPlan(model, repo, revision or "main", commit, tree, files, missing, new_bytes)


def plan_download(hub: Hub, model: str) -> DownloadPlan:
    """Return the plan for the model `org/repo[@revision][:file.gguf]`, or `:QUANT` for a file as `choose_quant` does.

    Raises UsageError, NotFoundError for network and access failures, and ModelError without safetensors.
    """
    repo, revision = split_name(model)
    if (quant := split_quant(model)[1]) is not None:
        plan = plan_files(hub, model, repo, revision, lambda _, files: _select_quant(repo, quant, files))
        return replace(plan, model=f"{split_quant(model)[0]}:{plan.files[0].name}")
    gguf = split_file(model)[1]
    if gguf is not None:
        return plan_files(hub, model, repo, revision, lambda _, files: _select_gguf(repo, gguf, files))
    plan = plan_files(hub, model, repo, revision, partial(_select, hub, repo))
    names = {file.name for file in plan.files}
    if store.has_adapter_files(names):
        return plan
    effects = {
        "config.json": "it cannot be used as a model",
        "tokenizer.json": "it can be measured, but not given text",
    }
    if TEKKEN_FILE in names:
        del effects["tokenizer.json"]
    warnings = [f"{repo} has no {name}: {effect}" for name, effect in effects.items() if name not in names]
    return replace(plan, warnings=tuple(warnings))


def _select(hub: Hub, repo: str, commit: str, files: Iterable[HubFile]) -> list[HubFile]:
    # Only plain names in the root: `../x.json` would be written outside the snapshot.
    root = {file.name: file for file in files if safe_name(file.name)}
    small = [f for f in root.values() if f.name.endswith((".json", ".jinja")) and not f.name.endswith(".index.json")]
    if MODULES in root:
        small += [file for file in files if MODULE_FILE.fullmatch(file.name)]
    small += [file for file in files if TEMPLATE_FILE.fullmatch(file.name)]
    if INDEX in root:
        index = parse_object(read_small_file(hub, repo, commit, root[INDEX]), INDEX, MAX_INDEX_BYTES)
        shards = store.read_shards(index)
        if index_counts(shards, root):
            for name in shards:
                if name not in root:
                    message = f"{INDEX}: names {name}, which {repo} does not hold"
                    raise ModelError(message, "the repository is incomplete")
            return [*small, root[INDEX], *(root[name] for name in shards)]
    if SINGLE in root:
        return [*small, root[SINGLE]]
    for weights in (ADAPTER_WEIGHTS, MLX_WEIGHTS):
        if ADAPTER_CONFIG in root and weights in root:
            return [root[ADAPTER_CONFIG], root[weights]]
    if ggufs := store.gguf_files(file.name for file in files if safe_path(file.name)):
        more = f" and {len(ggufs) - 6} more" if ggufs[6:] else ""
        listed = ", ".join(f"{repo}:{name}" for name in ggufs[:6])
        raise ModelError(f"{repo}: no safetensors but GGUF files, each a model", f"give one: {listed}{more}")
    others = sorted(f.name for f in files if f.name.endswith((*_PICKLED, ".gguf", ".safetensors")))
    pickled = [name for name in others if name.endswith(_PICKLED)]
    problem = f"only {[*pickled, *others][0]}" if others else "nor in a GGUF file"
    hint = "look for a model in this format with: https://huggingface.co/models?library=safetensors"
    if pickled:
        problem += ", whose format can run code when opened and is never read here"
        hint = "https://huggingface.co/spaces/safetensors/convert makes a safetensors version of a repository"
    raise ModelError(f"{repo}: no weights in {SINGLE} or {INDEX}, {problem}", hint)


def _select_gguf(repo: str, name: str, files: Iterable[HubFile]) -> list[HubFile]:
    by_name = {file.name: file for file in files if safe_path(file.name)}
    parts = part_names(name)
    for part in parts:
        if part not in by_name:
            raise NotFoundError(f"{repo} has no file {part}", _ggufs_hint(by_name))
    return [by_name[part] for part in parts]


def _select_quant(repo: str, quant: str, files: Iterable[HubFile]) -> list[HubFile]:
    by_name = {file.name: file for file in files if safe_path(file.name)}
    name = choose_quant(store.gguf_files(by_name), quant)
    if name is None:
        raise NotFoundError(f"{repo} has no GGUF file of {quant}", _ggufs_hint(by_name))
    return _select_gguf(repo, name, by_name.values())


def _ggufs_hint(names: Iterable[str]) -> str:
    ggufs = store.gguf_files(names)
    return f"it holds {', '.join(ggufs[:8])}" if ggufs else "it holds no GGUF file"


def read_small_file(hub: Hub, repo: str, commit: str, file: HubFile) -> bytes:
    """Return the verified contents of a file of at most 32 MiB, from the cache or the hub. Writes nothing."""
    if (path := _find_stored(repo, commit, file)) is not None:
        return path.read_bytes()
    if file.size > MAX_INDEX_BYTES:
        problem = f"{human_bytes(file.size)}, more than the {human_bytes(MAX_INDEX_BYTES)} allowed"
        raise ModelError(f"{file.name}: {problem}", "this is not a model")
    data = hub.read(repo, commit, file.name, 0, max(file.size, 1))
    digest = file.hasher()
    digest.update(data)
    if digest.hexdigest() != file.digest:
        raise _hash_mismatch(repo, file)
    return data


def _blob(repo: str, file: HubFile) -> Path:
    return store.repo_folder(repo) / "blobs" / file.digest


def _find_stored(repo: str, commit: str, file: HubFile) -> Path | None:
    path, unlinked = _blob(repo, file), store.repo_folder(repo) / "snapshots" / commit / file.name
    if unlinked.is_file() and not unlinked.is_symlink():  # see `_link`
        path = unlinked
    return path if path.exists() and store.file_bytes(path) == file.size else None


def _partial(repo: str, file: HubFile) -> Path:
    return _blob(repo, file).with_name(f"{file.digest}.mycli.incomplete")


def _bytes_left(repo: str, file: HubFile) -> int:
    received = store.file_bytes(_partial(repo, file))
    return file.size - received if received <= file.size else file.size


def lock_folder(folder: Path) -> Path:
    """Return the folder of locks (of this program and huggingface_hub) for a repository's cache `folder`."""
    return folder.parent / ".locks" / folder.name


def repo_lock(folder: Path, model: str, note: Callable[[str], None]) -> AbstractContextManager[None]:
    """Return a lock on a repository's cache `folder`; `note` names the process that is waited for."""
    path = lock_folder(folder) / "mycli.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return locked(path, lambda holder: note(f"{model} is in use by process {holder}: waiting for it"))


def check_space(plan: DownloadPlan) -> None:
    """Raise ResourceError if the cache's disk has less free space than the download needs."""
    require_space(store.repo_folder(plan.repo), plan.new_bytes, code="cache-full")


def fetch_files(hub: Hub, plan: DownloadPlan, *, force: bool, advance: Callable[[float], None]) -> Source:
    """Carry out a plan; force: skip the check of free space. `advance` receives bytes, negative if discarded.

    Raises as `plan_download` does, ResourceError for a full disk, GateError for contents whose hash stays wrong.
    """
    folder = store.repo_folder(plan.repo)
    snapshot = folder / "snapshots" / plan.commit
    source = Source(plan.model, snapshot / (split_file(plan.model)[1] or ""), plan.repo, plan.commit)
    if not plan.missing and all((snapshot / file.name).exists() for file in plan.files):
        with suppress(OSError):  # a complete cache may be read-only
            _write_ref(folder, plan)
        return source
    if not force:
        check_space(plan)
    record = {"format_version": 1, "files": dict(sorted(plan.tree.values.items()))}
    with ExitStack() as lock:
        with disk_errors(folder):
            lock.enter_context(repo_lock(folder, plan.model, hub.note))  # first: a removal may delete the folders
            for subfolder in (folder / "blobs", folder / "trees", snapshot):
                subfolder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / "trees" / f"{plan.commit}.json", json.dumps(record, indent=1).encode())
        for file in plan.files:
            if _find_stored(plan.repo, plan.commit, file) is None:
                _fetch(hub, plan, file, advance)
            elif file in plan.missing:
                # Downloaded by another process since the plan was made.
                advance(_bytes_left(plan.repo, file))
            _link(snapshot / file.name, _blob(plan.repo, file))
        # Last: a branch must not point to an incomplete snapshot.
        _write_ref(folder, plan)
    return source


def _fetch(hub: Hub, plan: DownloadPlan, file: HubFile, advance: Callable[[float], None]) -> None:
    path = _partial(plan.repo, file)
    # Twice: the first hash may be wrong because an earlier attempt left damaged bytes.
    for _ in range(2):
        with PartialFile(path, file, advance) as part:
            part.receive(hub, plan.repo, plan.commit)
            complete = part.finish()
        if complete:
            try:
                os.replace(path, _blob(plan.repo, file))
            except FileNotFoundError:  # without working locks, another process has renamed the same bytes
                if _find_stored(plan.repo, plan.commit, file) is None:
                    raise
            return
        path.unlink(missing_ok=True)
        advance(-file.size)
        hub.note(f"{file.name}: what arrived does not match its hash, and was discarded")
    raise _hash_mismatch(plan.repo, file)


def _hash_mismatch(repo: str, file: HubFile) -> GateError:
    return GateError(
        f"{file.name}: what the server sends does not have the hash {file.digest} that {repo} records",
        "a proxy or a mirror may alter it: check HF_ENDPOINT and HTTPS_PROXY",
    )


def _link(pointer: Path, blob: Path) -> None:
    target = Path(os.path.relpath(blob, pointer.parent))
    if (pointer.is_symlink() and pointer.readlink() == target) or not blob.exists():  # the latter: moved, see below
        return
    pointer.parent.mkdir(parents=True, exist_ok=True)
    # Symlinks are replaced by a rename, so that a reader never finds the name missing.
    temporary = pointer.with_name(f".{pointer.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # A file system without symlinks, such as exFAT: the file itself is moved there, as huggingface_hub does.
        os.replace(blob, pointer)
        return
    os.replace(temporary, pointer)


def _write_ref(folder: Path, plan: DownloadPlan) -> None:
    path = folder / "refs" / plan.revision
    if plan.revision != plan.commit and (not path.exists() or path.read_text(encoding="utf-8") != plan.commit):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, plan.commit.encode())
