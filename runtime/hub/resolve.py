"""Resolves a model name to a folder: a path, a built-in model, a quantized one, or one in the Hugging Face cache.

A name with two meanings is an error that names the spelling of each: a folder `pico` must not replace the built-in
model silently. No network.
"""

import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.adapter_config import ADAPTER_CONFIG, adapter_base, is_adapter
from mycli.runtime.checkpoint.gguf_parts import is_gguf, part_names
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.hub import store
from mycli.runtime.hub.names import (
    GGUF,
    choose_quant,
    is_hub_name,
    is_path,
    not_pulled_by_ollama,
    ollama_name,
    split_file,
    split_name,
    split_quant,
    suggest_models,
)
from mycli.runtime.hub.store import BUILT_IN
from mycli.runtime.utils.files import expand_user
from mycli.runtime.utils.json_fields import read_object

if TYPE_CHECKING:  # see `_find_stored`
    from mycli.runtime.hub.other_stores import StoredModel

_MAX_ENTRIES = 10_000  # of a folder that is searched for a name


@dataclass(frozen=True)
class Source:
    """The place of a model: `folder` (the first file of a GGUF model); `repo` and `revision` (a commit) if cached."""

    name: str
    folder: Path
    repo: str | None = None
    revision: str | None = None
    adapter: Path | None = None  # of a model of Ollama's that contains one

    def open(self) -> ModelFolder:
        """Read config.json or the GGUF header, and that of the adapter. Raises ModelError and NotFoundError."""
        folder = open_model_folder(self.folder)
        return folder if self.adapter is None else folder.with_adapter(self.label, self.adapter)

    @property
    def label(self) -> str:
        stem = self.folder.resolve().name.removesuffix(GGUF)
        # A file of Ollama's store is named by a digest.
        return self.repo or (self.name if is_gguf(self.folder) and self.folder.suffix != GGUF else stem)


def resolve(model: str, *, offline: bool = False) -> Source:
    """Return the source of a model.

    Raises NotFoundError with the closest names or the missing files, UsageError, and ModelError (also for an adapter).
    """
    source = _find(model, offline)
    if is_adapter(source.folder):
        base = adapter_base(source.folder) or "MODEL"
        raise ModelError(
            f"{model}: a LoRA adapter, which needs its model",
            code="give-adapter",
            data={"base": shlex.quote(base), "adapter": shlex.quote(model)},
        )
    return source


def resolve_adapter(name: str, *, offline: bool = False) -> Source:
    """Return the source of a LoRA adapter: a folder, a GGUF file, or one of a repository. Raises as `resolve` does."""
    hint = f"an adapter is a GGUF file, or a folder in the layout of PEFT or mlx-lm, with {ADAPTER_CONFIG}"
    if is_path(name) and (file := expand_user(name)).exists() and not file.is_dir() and not is_gguf(file):
        raise ModelError(f"{name}: a file, but an adapter is a folder", f"give its folder: {file.parent}")
    try:
        source = _find(name, offline)
    except NotFoundError as error:
        message = error.message.replace("no model of that name", "no adapter of that name")
        raise error.with_message(message) from None
    except ModelError:
        if not Path(name).is_dir():
            raise
        raise ModelError(f"{name}: not a LoRA adapter", hint) from None
    if source.adapter is not None:
        return replace(source, folder=source.adapter, adapter=None)
    if not is_adapter(source.folder) and not is_gguf(source.folder):
        raise ModelError(f"{name}: not a LoRA adapter", hint)
    return source


def _find(model: str, offline: bool) -> Source:
    if not model or "\x00" in model or len(model) > 4096:
        raise UsageError("the name of the model is empty or not a name", code="list-models")
    if ollama_name(model) is not None:
        if (stored := _find_stored(model)) is None:
            raise not_pulled_by_ollama(model)
        return Source(stored.name, stored.path, adapter=stored.adapter)
    model = named_file(model)
    try:
        is_gguf_file = model.endswith(GGUF) and ":" not in model
        if is_path(model) or (model.partition("@")[0].count("/") > 1 and not is_hub_name(model)) or is_gguf_file:
            return _resolve_path_or_stored(model)
        meanings = _meanings(model)
        if len(meanings) > 1:
            raise NotFoundError(f"{model} means {len(meanings)} models", f"write {' or '.join(meanings)}")
        for source in meanings.values():
            if source is not None:
                return source
        if "/" in model and (meanings or not Path(model).is_file()):
            return _resolve_cached_or_stored(model, offline)
        if "/" in model or Path(model).is_dir():
            return _resolve_path(model)
        if (stored := _find_stored(model)) is not None:
            return Source(model, stored.path, adapter=stored.adapter)
        if model in store.model_folders():
            folder = store.data_dir() / "models" / model
            raise ModelError(f"{model} is damaged: {folder} has no config.json", code="remove-model")
        if _work_folder(store.data_dir() / "models" / model).is_dir():
            raise NotFoundError(f"{model}: its quantization is not finished", code="finish-quantizing")
        _require_finished(model)
        suggestions = suggest_models(model)
        raise NotFoundError(
            f"{model}: no model of that name here{_did_you_mean(model)}",
            code="hub-candidates" if suggestions else "search-hub",
            data={"words": shlex.quote(re.sub(r"[:/]", " ", model)), "candidates": ", ".join(suggestions)},
        )
    except OSError as error:  # a name too long for the file system, or a folder without read permission
        raise NotFoundError(f"{model}: {error.strerror}", "check the path and its permissions") from None


def _work_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.work")


def _require_finished(model: str) -> None:
    folder = _work_folder(expand_user(model))
    if folder.is_dir():
        raise NotFoundError(
            f"{model}: its quantization is not finished",
            code="finish-quantizing-folder",
            data={"folder": shlex.quote(str(folder))},
        )


def named_file(model: str) -> str:
    """Return `org/repo:FILE` for a quant such as `org/repo:Q4_K_M`, of the files that are downloaded; else `model`."""
    name, quant = split_quant(model)
    if quant is None:
        return model
    repo, revision = split_name(name)
    folder = store.repo_folder(repo)
    commit = store.read_ref(folder, revision or "main")
    snapshot = folder / "snapshots" / (commit or "none")
    file = choose_quant(store.gguf_files_in(snapshot), quant)
    return model if file is None else f"{name}:{file}"


def _meanings(model: str) -> dict[str, Source | None]:
    # The sources that `model` may mean, by unambiguous spelling; None for the cache, read later.
    meanings: dict[str, Source | None] = {}
    if (Path(model) / "config.json").is_file():
        meanings[f"./{model}"] = Source(model, Path(model))
    folders = [store.built_in_folder(model)] if model in BUILT_IN else []
    if "/" not in model and model in store.quantized_models():
        folders.append(store.data_dir() / "models" / model)
    meanings |= {str(folder): Source(model, folder) for folder in folders}
    if is_hub_name(model) and "@" not in model and store.repo_folder(model).exists():
        meanings[f"{model}@main"] = None
    return meanings


def _resolve_path(model: str) -> Source:
    folder = expand_user(model)
    if folder.is_file() and folder.suffix == GGUF:
        return Source(model, folder)
    if folder.is_file():
        hint = f"give its folder: {folder.parent}"
        raise ModelError(f"{model}: a file, but a model is a *.gguf file or a folder with config.json", hint)
    if folder.exists() and not folder.is_dir():  # a device or a pipe
        raise ModelError(f"{model}: neither a folder nor a regular file", code="list-models")
    if not folder.is_dir():
        _require_finished(model)
        kind = "file" if folder.suffix == GGUF else "folder"
        raise NotFoundError(f"{model}: no such {kind}{_suggestion(_similar_paths(model))}", code="list-models")
    if (folder / "config.json").exists():
        return Source(model, folder)
    if ggufs := store.gguf_files_in(folder):
        listed = _listed([str(folder / name) for name in ggufs], 4)
        raise ModelError(f"{model}: GGUF files without config.json", f"give one: {listed}")
    if not is_adapter(folder):
        hint = "a model is a folder in the Hugging Face layout"
        if (folder / "params.json").is_file():
            hint += "; params.json is Mistral AI's own: use a version of the model with config.json"
        raise ModelError(f"{model}: no config.json in this folder", hint)
    return Source(model, folder)


def _resolve_path_or_stored(model: str) -> Source:
    try:
        return _resolve_path(model)
    except NotFoundError:  # or `host/namespace/model:tag`, which Ollama pulled from another registry than its own
        if is_path(model) or (stored := _find_stored(model)) is None:
            raise
        return Source(model, stored.path, adapter=stored.adapter)


def _resolve_cached_or_stored(model: str, offline: bool) -> Source:
    try:
        return _resolve_cached(model, offline)
    except (NotFoundError, UsageError):  # the latter for a tag of Ollama's, which no name of the hub has
        if (stored := _find_stored(model)) is None:
            raise
        return Source(model, stored.path, adapter=stored.adapter)


def _find_stored(model: str) -> "StoredModel | None":
    # Imported here, since most names are found before other programs' folders are searched.
    from mycli.runtime.hub.other_stores import find_stored

    return find_stored(model)


def _resolve_cached(model: str, offline: bool) -> Source:
    file = split_file(model)[1]

    def missing_in(commit: str) -> list[str]:
        snapshot = folder / "snapshots" / commit
        if file is not None:
            return [name for name in part_names(file) if not (snapshot / name).exists()]
        return store.missing_files(snapshot, store.read_tree(folder, commit))

    def not_found(problem: str) -> NotFoundError:
        return NotFoundError(f"{model} is {problem}", code="pull-online" if offline else "pull", data={"model": model})

    repo, revision = split_name(model)
    folder = store.repo_folder(repo)
    cached = store.commits(folder)
    commit = store.read_ref(folder, revision or "main")
    if commit is None and revision is None:
        # An interrupted first download has a record, but no branch points to it yet: name its missing files.
        commit = next((commit for commit, refs in cached.items() if not refs and missing_in(commit)), None)
    if commit is None or commit not in cached:
        names = [f"{repo}@{name}" for other, refs in cached.items() for name in refs or (other,)]
        here = f"; here is {' and '.join(names[:3])}" if names else _did_you_mean(model)
        raise not_found(f"not on this machine{here}")
    snapshot = folder / "snapshots" / commit
    if missing := missing_in(commit):
        ggufs = [] if file else store.gguf_files_in(snapshot)
        if ggufs:
            choices = " or ".join(f"{model}:{name}" for name in ggufs[:4])
            raise NotFoundError(f"{model}: GGUF files of it are here, each a model of its own", f"give one: {choices}")
        raise not_found(f"only partly downloaded: missing {_listed(missing, 8)}")
    return Source(model, snapshot / (file or ""), repo, commit)


def _listed(names: list[str], limit: int) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if names[limit:] else "")


def _did_you_mean(model: str) -> str:
    import difflib  # imported only when a name was not found

    name = model.partition("@")[0]
    untagged = name.partition(":")[0].lower()  # pico:latest, as Ollama names it
    known = {known.lower(): known for known in store.local_model_names()}
    close = [known[key] for key in known if untagged in (key, key.rpartition("/")[2])]
    close = close or [known[key] for key in difflib.get_close_matches(untagged, known, 3, 0.7)]
    close = [candidate for candidate in close if candidate != name]
    return _suggestion(close or _similar_paths(model))


def _similar_paths(model: str) -> list[str]:
    # The model whose file or folder is named most like the path `model`, spelled as that path is.
    import difflib

    path = expand_user(model)
    try:
        entries = list(islice(path.parent.iterdir(), _MAX_ENTRIES))
    except OSError:
        return []
    # os.path.isfile, unlike that of Path, passes folders of other users over.
    models = (entry.name for entry in entries if entry.suffix == GGUF or os.path.isfile(entry / "config.json"))
    known = {name.lower(): name for name in models}
    prefix = model.rstrip("/").removesuffix(path.name)
    return [prefix + known[name] for name in difflib.get_close_matches(path.name.lower(), known, 1, 0.8)]


def _suggestion(names: list[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def custom_code_warning(folder: Path) -> str:
    """Return a warning if config.json names Python code of the repository, which is never run; else ""."""
    if folder.suffix != GGUF:
        with suppress(ModelError):
            if read_object(folder / "config.json").values.get("auto_map"):
                return "config.json: auto_map asks for custom code, which is ignored: a model's own code is never run"
    return ""
