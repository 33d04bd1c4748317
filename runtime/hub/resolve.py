"""From the name of a model to its folder: a path, a built-in model, one quantized here, or one in the hub's cache.

Reads the cache as other tools write it: `models--org--name/{refs,blobs,snapshots,trees}`. Knows no network (that is
`runtime.hub.client` and `download`) and no torch; importing it costs nothing worth measuring.
"""

import os
import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mycli.runtime.checkpoint.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_base, is_adapter
from mycli.runtime.checkpoint.gguf.files import part_names, part_number
from mycli.runtime.checkpoint.safetensors_header import INDEX, SINGLE
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.hub.names import (
    DATASETS,
    GGUF,
    REPO,
    candidates,
    is_hub_name,
    is_path,
    safe_name,
    split_file,
    split_name,
)
from mycli.runtime.utils.json_fields import Fields, read_object

MAX_INDEX_BYTES = 32 << 20
MAX_TREE_BYTES = 64 << 20
BUILT_IN = ("pico", "pico-draft")
RECORD = "mycli.json"  # what a model quantized here says of itself
# What a model needs to answer, besides config.json and the weights; other JSON files are fetched, but not missed.
ESSENTIAL = frozenset(
    {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", INDEX}
)
COMMIT = re.compile(r"[0-9a-f]{40}")
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


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


@dataclass(frozen=True)
class HubFile:
    """A file of a commit. `digest`: sha256 (64 hex digits), or for small files git's sha1 of the blob (40)."""

    name: str
    size: int
    digest: str


def _directory(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default)


def home() -> Path:
    """Where quantized models live, in `models/NAME`: $MYCLI_HOME, else `mycli` under $XDG_DATA_HOME."""
    chosen = os.environ.get("MYCLI_HOME")
    return Path(chosen).expanduser() if chosen else _directory("XDG_DATA_HOME", ".local/share") / "mycli"


def state() -> Path:
    """Where history and benchmark records live: `mycli` under $XDG_STATE_HOME."""
    return _directory("XDG_STATE_HOME", ".local/state") / "mycli"


def hub_cache() -> Path:
    """The Hugging Face cache, by the rules of huggingface_hub, without importing it."""
    chosen = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not chosen:
        base = os.environ.get("HF_HOME") or _directory("XDG_CACHE_HOME", ".cache") / "huggingface"
        chosen = os.path.join(base, "hub")
    return Path(os.path.expandvars(chosen)).expanduser()


def repo_folder(repo: str) -> Path:
    """The folder of `org/name`, or `datasets/org/name`, in the cache."""
    kind = "" if repo.startswith(DATASETS) else "models--"
    return hub_cache() / (kind + repo.replace("/", "--"))


def file_bytes(path: Path) -> int:
    """The size of a file; 0 for one that is missing, or a link whose blob is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def parse_tree(records: Fields) -> tuple[HubFile, ...]:
    """The files of a commit, from an object as `trees/` of the cache has it; without those whose digest is no hash.

    Raises ModelError for what is no such object.
    """
    files = []
    for name in records.values:
        entry = records.object(name)
        size = entry.integer("lfs_size", entry.integer("size", low=0, high=1 << 60), low=0, high=1 << 60)
        digest = entry.text("lfs_sha256", entry.text("blob_id"))
        if DIGEST.fullmatch(digest):
            files.append(HubFile(name, size, digest))
    return tuple(files)


def read_tree(folder: Path, commit: str) -> tuple[HubFile, ...] | None:
    """The files of `commit` as recorded in `trees/` under the repository's cache `folder`; None if not or badly so."""
    try:
        return parse_tree(read_object(folder / "trees" / f"{commit}.json", MAX_TREE_BYTES).object("files"))
    except ModelError:
        return None


def read_shards(raw: Fields) -> tuple[str, ...]:
    """The shard files that a safetensors index names, sorted. Raises ModelError for names that are no such file."""
    names = set()
    for shard in raw.object("weight_map").values.values():
        if not isinstance(shard, str) or not safe_name(shard) or not shard.endswith(".safetensors"):
            raise raw.fail("weight_map", f"names {str(shard)!r:.80}, which is not a safetensors file beside it")
        names.add(shard)
    if not names:
        raise raw.fail("weight_map", "is empty")
    return tuple(sorted(names))


def missing_files(folder: Path, tree: Iterable[HubFile] | None) -> list[str]:
    """What the model or adapter in `folder` lacks to be used; `tree` is what its commit holds, where that is known."""
    if is_adapter(folder) or holds_adapter(file.name for file in tree or ()):
        return sorted(name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (folder / name).exists())
    needed = {"config.json"} | (ESSENTIAL & {file.name for file in tree or ()})
    if (folder / INDEX).exists():
        needed |= set(read_shards(read_object(folder / INDEX, MAX_INDEX_BYTES)))
    elif INDEX not in needed:
        needed.add(SINGLE)
    return sorted(name for name in needed if not (folder / name).exists())


def holds_adapter(names: Iterable[str]) -> bool:
    """Whether files of those names are a LoRA adapter, and no model."""
    held = set(names)
    return ADAPTER_CONFIG in held and "config.json" not in held


def gguf_files(names: Iterable[str]) -> list[str]:
    """Those of `names` that are GGUF models, sorted: whole files, first parts, and no projector of images."""
    found = [name for name in names if name.endswith(GGUF) and not name.lower().startswith("mmproj")]
    return sorted(name for name in found if part_number(name) in (None, 1))


def _spelled(folder: Path, names: list[str]) -> str:
    shown = ", ".join(str(folder / name) for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if names[4:] else "")


def commits(folder: Path) -> dict[str, tuple[str, ...]]:
    """Commits of which the repository's cache `folder` holds anything, with the branches and tags that point there."""
    paths = [*_children(folder / "snapshots"), *_children(folder / "trees")]
    names = (path.name.removesuffix(".json") for path in paths)
    found: dict[str, list[str]] = {name: [] for name in names if COMMIT.fullmatch(name)}
    refs = folder / "refs"
    for path in sorted(refs.rglob("*")):
        revision = str(path.relative_to(refs))
        commit = read_ref(folder, revision)
        if commit in found:
            found[commit].append(revision)
    return {commit: tuple(revisions) for commit, revisions in found.items()}


def read_ref(folder: Path, revision: str) -> str | None:
    """The commit that a branch or tag pointed to when it was last fetched; a commit is itself."""
    if COMMIT.fullmatch(revision):
        return revision
    try:
        commit = (folder / "refs" / revision).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) else None


def built_in_folder(name: str) -> Path:
    """The folder of a model that is a part of this program."""
    return Path(__file__).parents[1] / "pico" / name


def local_names() -> list[str]:
    """Names of all models on this machine: built in, quantized here, and in the cache; for completion and hints."""
    return [*BUILT_IN, *quantized(), *cached_repos()]


def quantized() -> list[str]:
    """Names of the models quantized here."""
    return [name for name in stored() if (home() / "models" / name / "config.json").is_file()]


def stored() -> list[str]:
    """Names of all folders where models quantized here lie, whatever became of what is in them."""
    folders = _children(home() / "models")
    return sorted(p.name for p in folders if not p.name.startswith(".") and (p.is_dir() or p.is_symlink()))


def cached_repos() -> list[str]:
    """`org/name` of the model repositories in the Hugging Face cache."""
    names = (path.name.removeprefix("models--").replace("--", "/") for path in _children(hub_cache(), "models--*"))
    return sorted(name for name in names if REPO.fullmatch(name))


def _children(folder: Path, pattern: str = "*") -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except OSError:  # a folder that may not be read holds nothing for us
        return []


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
    if is_path(name) and (file := Path(name).expanduser()).exists() and not file.is_dir():
        raise ModelError(f"{name}: a file, but an adapter is a folder", f"give its folder: {file.parent}")
    try:
        source = _find(name, offline)
    except NotFoundError as error:
        raise error.reworded(error.message.replace("no model of that name", "no adapter of that name")) from None
    if not is_adapter(source.folder):
        raise ModelError(f"{name}: not a LoRA adapter: no {ADAPTER_CONFIG}", "an adapter is a folder in PEFT's layout")
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
            raise ModelError(f"{model} is damaged: {home() / 'models' / model} has no config.json", code="remove-model")
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
        found[str(home() / "models" / model)] = Source(model, home() / "models" / model)
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
    if not (folder / "config.json").exists() and (inside := gguf_files(path.name for path in _children(folder))):
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
    held_files = gguf_files(path.name for path in _children(folder / "snapshots" / commit))
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
    known = {known.lower(): known for known in local_names()}
    close = [known[one] for one in known if name.lower() in (one, one.rpartition("/")[2])]
    close = close or [known[one] for one in difflib.get_close_matches(name.lower(), known, 3, 0.7)]
    others = [one for one in close if one != name]
    return f"; did you mean {' or '.join(others)}?" if others else ""


def custom_code(folder: Path) -> str:
    """A warning where config.json asks for Python code of the repository to be run, else nothing. It is never run."""
    if folder.suffix == GGUF:
        return ""
    with suppress(ModelError):
        if read_object(folder / "config.json").values.get("auto_map"):
            return "config.json: auto_map asks for custom code, which is ignored: a model's own code is never run"
    return ""
