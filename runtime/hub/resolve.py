"""From the name of a model to its folder: a path, a built-in model, one quantized here, or one in the hub's cache.

What lies where is `runtime.hub.store`. Knows no network (that is `runtime.hub.client` and `download`) and no torch;
importing it costs nothing worth measuring.
"""

import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mycli.runtime.checkpoint.adapter_config import ADAPTER_CONFIG, adapter_base, is_adapter
from mycli.runtime.checkpoint.gguf.files import part_names
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.hub.names import (
    GGUF,
    candidates,
    is_hub_name,
    is_path,
    split_file,
    split_name,
)
from mycli.runtime.hub.store import (
    BUILT_IN,
    built_in_folder,
    children,
    commits,
    data_dir,
    gguf_files,
    local_model_names,
    missing_files,
    quantized,
    read_ref,
    read_tree,
    repo_folder,
    stored,
)
from mycli.runtime.utils.json_fields import read_object


@dataclass(frozen=True)
class Source:
    """Where a model lies. `repo` and `revision` (a commit of 40 hex digits) only for one of the Hugging Face cache."""

    name: str
    folder: Path
    repo: str | None = None
    revision: str | None = None

    @property
    def label(self) -> str:
        """A short name that does not depend on where it lies: the repository, or the last part of the folder."""
        return self.repo or self.folder.resolve().name.removesuffix(GGUF)


def _spelled(folder: Path, names: list[str]) -> str:
    shown = ", ".join(str(folder / name) for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if names[4:] else "")


def resolve(model: str, *, offline: bool = False) -> Source:
    """The folder of `model`: a local folder, `pico`, a model quantized here, or `org/repo[@revision]` fully downloaded.

    A name with two meanings is refused with the spelling of each. Raises NotFoundError (with the closest names, or what
    an unfinished download lacks), UsageError, and ModelError, also for an adapter.
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
    """The folder of a LoRA adapter: a local one, or `org/repo[@revision]` fully downloaded.

    Raises what `resolve` raises, and ModelError for what is no adapter.
    """
    layout = f"an adapter is a folder in PEFT's layout, with {ADAPTER_CONFIG}"
    if is_path(name) and (file := Path(name).expanduser()).exists() and not file.is_dir():
        raise ModelError(f"{name}: a file, but an adapter is a folder", f"give its folder: {file.parent}")
    try:
        source = _find(name, offline)
    except NotFoundError as error:
        raise error.with_message(error.message.replace("no model of that name", "no adapter of that name")) from None
    except ModelError:
        if not Path(name).is_dir():
            raise
        raise ModelError(f"{name}: not a LoRA adapter", layout) from None
    if not is_adapter(source.folder):
        raise ModelError(f"{name}: not a LoRA adapter", layout)
    return source


def _find(model: str, offline: bool) -> Source:
    if not model or "\x00" in model or len(model) > 4096:
        raise UsageError("the name of the model is empty or not a name", code="list-models")
    try:
        if is_path(model) or model.partition("@")[0].count("/") > 1:
            return _resolve_path(model)
        if model.endswith(GGUF) and ":" not in model:
            return _resolve_path(model)
        meanings = _meanings(model)
        if len(meanings) > 1:
            raise NotFoundError(f"{model} means {len(meanings)} models", f"write {' or '.join(meanings)}")
        for source in meanings.values():
            if source is not None:
                return source
        if "/" in model:
            return _resolve_cached(model, offline)
        if Path(model).is_dir():
            return _resolve_path(model)
        if model in stored():
            raise ModelError(
                f"{model} is damaged: {data_dir() / 'models' / model} has no config.json", code="remove-model"
            )
        found = candidates(model)
        raise NotFoundError(
            f"{model}: no model of that name here{_suggestion(model)}",
            code="hub-candidates" if found else "search-hub",
            data={"words": shlex.quote(re.sub(r"[:/]", " ", model)), "candidates": ", ".join(found)},
        )
    except OSError as error:  # a name too long for the file system, a folder that may not be read
        raise NotFoundError(f"{model}: {error.strerror}", "check the path and its permissions") from None


def _meanings(model: str) -> dict[str, Source | None]:
    """Everything that `model` may mean, by an unmistakable spelling; None for the cache, which is looked into later."""
    found: dict[str, Source | None] = {}
    if (Path(model) / "config.json").is_file():
        found[f"./{model}"] = Source(model, Path(model))
    if model in BUILT_IN:
        found[str(built_in_folder(model))] = Source(model, built_in_folder(model))
    if "/" not in model and model in quantized():
        found[str(data_dir() / "models" / model)] = Source(model, data_dir() / "models" / model)
    if is_hub_name(model) and "@" not in model and repo_folder(model).exists():
        found[f"{model}@main"] = None
    return found


def _resolve_path(model: str) -> Source:
    try:
        folder = Path(model).expanduser()
    except RuntimeError:  # ~name of a person who does not exist
        folder = Path(model)
    if folder.is_file() and folder.suffix == GGUF:
        return Source(model, folder)
    if folder.is_file():
        hint = f"give its folder: {folder.parent}"
        raise ModelError(f"{model}: a file, but a model is a *.gguf file or a folder with config.json", hint)
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{model}: neither a folder nor a regular file", code="list-models")
    if not folder.is_dir():
        raise NotFoundError(f"{model}: no such {'file' if folder.suffix == GGUF else 'folder'}", code="list-models")
    if not (folder / "config.json").exists() and (inside := gguf_files(path.name for path in children(folder))):
        raise ModelError(f"{model}: GGUF files without config.json", f"give one of them: {_spelled(folder, inside)}")
    if not (folder / "config.json").exists() and not is_adapter(folder):
        raise ModelError(f"{model}: no config.json in this folder", "a model is a folder in the Hugging Face layout")
    return Source(model, folder)


def _resolve_cached(model: str, offline: bool) -> Source:
    file = split_file(model)[1]

    def lacking(commit: str) -> list[str]:
        snapshot = folder / "snapshots" / commit
        if file is not None:
            return [name for name in part_names(file) if not (snapshot / name).exists()]
        return missing_files(snapshot, read_tree(folder, commit))

    def absent(problem: str) -> NotFoundError:
        return NotFoundError(f"{model} is {problem}", code="pull-online" if offline else "pull", data={"model": model})

    repo, revision = split_name(model)
    folder = repo_folder(repo)
    held = commits(folder)
    commit = read_ref(folder, revision or "main")
    if commit is None and revision is None:
        # A first download that never reached its end: recorded, but no branch points there yet.
        commit = next((one for one, names in held.items() if not names and lacking(one)), None)
    if commit is None or commit not in held:
        names = [f"{repo}@{name}" for one, revisions in held.items() for name in revisions or (one,)]
        here = f"; here is {' and '.join(names[:3])}" if names else _suggestion(model)
        raise absent(f"not on this machine{here}")
    missing = lacking(commit)
    held_files = gguf_files(path.name for path in children(folder / "snapshots" / commit))
    if missing and file is None and held_files:
        shown = " or ".join(f"{model}:{name}" for name in held_files[:4])
        raise NotFoundError(f"{model}: GGUF files of it are here, each a model of its own", f"give one: {shown}")
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise absent(f"only partly downloaded: missing {', '.join(missing[:8])}{more}")
    return Source(model, folder / "snapshots" / commit / (file or ""), repo, commit)


def _suggestion(model: str) -> str:
    import difflib  # only for a name that is not there

    name = model.partition("@")[0]
    known = {known.lower(): known for known in local_model_names()}
    close = [known[one] for one in known if name.lower() in (one, one.rpartition("/")[2])]
    close = close or [known[one] for one in difflib.get_close_matches(name.lower(), known, 3, 0.7)]
    others = [one for one in close if one != name]
    return f"; did you mean {' or '.join(others)}?" if others else ""


def custom_code_warning(folder: Path) -> str:
    """A warning where config.json asks for Python code of the repository to be run, else nothing. It is never run."""
    if folder.suffix == GGUF:
        return ""
    with suppress(ModelError):
        if read_object(folder / "config.json").values.get("auto_map"):
            return "config.json: auto_map asks for custom code, which is ignored: a model's own code is never run"
    return ""
