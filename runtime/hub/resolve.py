"""From the name of a model to its folder: a path, a built-in model, one quantized here, or one in the hub's cache.

Reads the cache as other tools write it: `models--org--name/{refs,blobs,snapshots,trees}`. Knows no network (that is
`runtime.hub.client` and `download`) and no torch; importing it costs nothing worth measuring.
"""

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.utils.json_fields import Fields, read_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 32 << 20
MAX_TREE_BYTES = 64 << 20
BUILT_IN = ("pico", "pico-draft")
# What a model needs to answer, besides config.json and the weights; other JSON files are fetched, but not missed.
ESSENTIAL = frozenset(
    {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", INDEX}
)
_REPO = re.compile(r"[A-Za-z0-9](?:[\w.-]{0,95})/[A-Za-z0-9_](?:[\w.-]{0,95})", re.ASCII)
_REVISION = re.compile(r"[\w+-][\w./+@-]{0,199}", re.ASCII)
_NAME = re.compile(r"[\w+-][\w.+ @=-]{0,199}", re.ASCII)
DATASETS = "datasets/"  # in front of `org/name`, in addresses too; models have nothing there
COMMIT = re.compile(r"[0-9a-f]{40}")
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Source:
    """Where a model lies. `repo` and `revision` (a commit of 40 hex digits) only for one of the Hugging Face cache."""

    name: str
    folder: Path
    repo: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class HubFile:
    """A file of a commit. `digest`: sha256 (64 hex digits), or for small files git's sha1 of the blob (40)."""

    name: str
    size: int
    digest: str


def _directory(variable: str, default: str, environment: Mapping[str, str]) -> Path:
    return Path(environment.get(variable) or Path.home() / default)


def home(environment: Mapping[str, str] = os.environ) -> Path:
    """Where quantized models live, in `models/NAME`: $MYCLI_HOME, else `mycli` under $XDG_DATA_HOME."""
    chosen = environment.get("MYCLI_HOME")
    return Path(chosen).expanduser() if chosen else _directory("XDG_DATA_HOME", ".local/share", environment) / "mycli"


def state(environment: Mapping[str, str] = os.environ) -> Path:
    """Where history and benchmark records live: `mycli` under $XDG_STATE_HOME."""
    return _directory("XDG_STATE_HOME", ".local/state", environment) / "mycli"


def cache(environment: Mapping[str, str] = os.environ) -> Path:
    """The Hugging Face cache, by the rules of huggingface_hub, without importing it."""
    chosen = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    if not chosen:
        base = environment.get("HF_HOME")
        folder = Path(base) if base else _directory("XDG_CACHE_HOME", ".cache", environment) / "huggingface"
        chosen = str(folder / "hub")
    return Path(os.path.expandvars(chosen)).expanduser()


def split_name(model: str) -> tuple[str, str | None]:
    """`org/repo[@revision]` as its parts. Raises UsageError for anything else, before it can become a path or a URL."""
    repo, _, revision = model.partition("@")
    parts_bad = "--" in repo or ".." in repo or repo.endswith((".git", ".", "-"))
    if not _REPO.fullmatch(repo) or parts_bad:
        raise UsageError(f"{model}: not a model of the hub", "give it as org/name or org/name@revision")
    if "@" in model and (not _REVISION.fullmatch(revision) or ".." in revision or revision.endswith("/")):
        raise UsageError(f"{model}: {revision!r} is not a revision", "give a branch, a tag or a commit")
    return repo, revision or None


def repo_folder(repo: str) -> Path:
    """The folder of `org/name`, or `datasets/org/name`, in the cache."""
    kind = "" if repo.startswith(DATASETS) else "models--"
    return cache() / (kind + repo.replace("/", "--"))


def safe_name(name: str) -> bool:
    """Whether a file of this name may be fetched: in the repository's root, with nothing that could act as a path."""
    return _NAME.fullmatch(name) is not None


def read_tree(folder: Path, commit: str) -> tuple[HubFile, ...] | None:
    """The files of `commit` as recorded in `trees/` under the repository's cache `folder`; None if not or badly so."""
    try:
        raw = read_object(folder / "trees" / f"{commit}.json", MAX_TREE_BYTES)
        entries = raw.object("files")
        files = []
        for name in entries.values:
            entry = entries.object(name)
            digest = entry.text("lfs_sha256", entry.text("blob_id"))
            size = entry.integer("lfs_size", entry.integer("size", low=0, high=1 << 60), low=0, high=1 << 60)
            if DIGEST.fullmatch(digest):
                files.append(HubFile(name, size, digest))
    except ModelError:
        return None
    return tuple(files)


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


def _weights(folder: Path) -> tuple[str, ...]:
    if (folder / INDEX).exists():
        return read_shards(read_object(folder / INDEX, MAX_INDEX_BYTES))
    return (SINGLE,)


def missing_files(folder: Path, tree: Iterable[HubFile] | None) -> list[str]:
    """What the model in `folder` lacks to be used; `tree` is what its commit holds, where that is known."""
    needed = {"config.json"}
    if tree is not None:
        needed |= ESSENTIAL & {file.name for file in tree}
    if INDEX not in needed or (folder / INDEX).exists():
        needed |= set(_weights(folder))
    return sorted(name for name in needed if not (folder / name).exists())


def commits(folder: Path) -> dict[str, tuple[str, ...]]:
    """Commits of which the repository's cache `folder` holds anything, with the branches and tags that point there."""
    paths = [*_children(folder / "snapshots"), *_children(folder / "trees", "*.json")]
    found: dict[str, list[str]] = {p.name[:40]: [] for p in paths if COMMIT.fullmatch(p.name.removesuffix(".json"))}
    refs = folder / "refs"
    for path in sorted(refs.rglob("*")):
        revision = str(path.relative_to(refs))
        commit = read_ref(folder, revision)
        if commit is not None and commit in found:
            found[commit].append(revision)
    return {commit: tuple(names) for commit, names in found.items()}


def read_ref(folder: Path, revision: str) -> str | None:
    """The commit that a branch or tag pointed to when it was last fetched; a commit is itself."""
    if COMMIT.fullmatch(revision):
        return revision
    try:
        commit = (folder / "refs" / revision).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) else None


def _resolve_cached(model: str, offline: bool) -> Source:
    repo, revision = split_name(model)
    folder = repo_folder(repo)
    hint = ("without --offline: " if offline else "") + f"mycli pull {model}"
    held = commits(folder)
    commit = read_ref(folder, revision or "main")
    if commit is None and revision is None:
        # A first download that never reached its end: recorded, but no branch points there yet.
        unfinished = (c for c, names in held.items() if not names and _missing(folder, c))
        commit = next(unfinished, None)
    if commit is None or commit not in held:
        names = [f"{repo}@{name}" for commit, names in held.items() for name in names or (commit,)]
        here = f"; here is {' and '.join(names[:3])}" if names else _suggestion(model)
        raise NotFoundError(f"{model} is not on this machine{here}", hint)
    missing = _missing(folder, commit)
    if missing:
        listed = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise NotFoundError(f"{model} is only partly downloaded: missing {listed}", hint)
    return Source(model, folder / "snapshots" / commit, repo, commit)


def _missing(folder: Path, commit: str) -> list[str]:
    return missing_files(folder / "snapshots" / commit, read_tree(folder, commit))


def local_names() -> list[str]:
    """Names of all models on this machine: built in, quantized here, and in the cache; for completion and hints."""
    return [*BUILT_IN, *quantized(), *cached()]


def quantized() -> list[str]:
    """Names of the models quantized here."""
    folder = home() / "models"
    return sorted(p.name for p in _children(folder) if not p.name.startswith(".") and (p / "config.json").is_file())


def cached() -> list[str]:
    """`org/name` of the model repositories in the Hugging Face cache."""
    names = (path.name.removeprefix("models--").replace("--", "/") for path in _children(cache(), "models--*"))
    return sorted(name for name in names if _REPO.fullmatch(name))


def _children(folder: Path, pattern: str = "*") -> Iterator[Path]:
    try:
        yield from folder.glob(pattern)
    except OSError:  # a folder that may not be read holds nothing for us
        return


def _suggestion(model: str) -> str:
    known = local_names()
    wanted = model.partition("@")[0].lower()
    same = [name for name in known if name.lower() == wanted or name.lower().rpartition("/")[2] == wanted]
    lower = {name.lower(): name for name in known}
    close = same or [lower[name] for name in difflib.get_close_matches(wanted, lower, 3, 0.7)]
    close = [name for name in close if name != model.partition("@")[0]]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _meanings(model: str) -> dict[str, Source | None]:
    """Everything that `model` may mean, by an unmistakable spelling; None for the cache, which is looked into later."""
    found: dict[str, Source | None] = {}
    if (Path(model) / "config.json").is_file():
        found[f"./{model}"] = Source(model, Path(model))
    if model in BUILT_IN:
        folder = Path(__file__).parents[1] / "pico" / model
        found[str(folder)] = Source(model, folder)
    if "/" not in model and model in quantized():
        found[str(home() / "models" / model)] = Source(model, home() / "models" / model)
    if model.count("/") == 1 and "@" not in model and repo_folder(model).exists():
        found[f"{model}@main"] = None
    return found


def _is_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.endswith("/") or "\\" in model


def _resolve_path(model: str) -> Source:
    try:
        folder = Path(model).expanduser()
    except RuntimeError:  # ~name of a person who does not exist
        folder = Path(model)
    if folder.is_file():
        hint = f"give its folder: {folder.parent}"
        raise ModelError(f"{model}: a file, but a model is a folder with config.json and *.safetensors", hint)
    if not folder.is_dir():
        raise NotFoundError(f"{model}: no such folder", "mycli list shows the models on this machine")
    if not (folder / "config.json").exists():
        raise ModelError(f"{model}: no config.json in this folder", "a model is a folder in the Hugging Face layout")
    return Source(model, folder)


def resolve(model: str, *, offline: bool = False) -> Source:
    """The folder of `model`: a local folder, `pico`, a model quantized here, or `org/repo[@revision]` fully downloaded.

    A name with two meanings is refused with the spelling of each. Raises NotFoundError (with the closest names, or what
    an unfinished download lacks), UsageError and ModelError.
    """
    if not model or "\x00" in model or len(model) > 4096:
        raise UsageError("the name of the model is empty or not a name", "mycli list shows the models on this machine")
    try:
        if _is_path(model) or model.partition("@")[0].count("/") > 1:
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
        known = ", ".join([*BUILT_IN, *quantized()])
        hint = f"known here: {known}; a model of the hub is org/name"
        raise NotFoundError(f"{model}: no model of that name{_suggestion(model)}", hint)
    except OSError as error:  # a name too long for the file system, a folder that may not be read
        raise NotFoundError(f"{model}: {error.strerror}", "check the path and its permissions") from None


def custom_code(folder: Path) -> str:
    """A warning where config.json asks for Python code of the repository to be run, else nothing. It is never run."""
    try:
        raw = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""
    if isinstance(raw, dict) and raw.get("auto_map"):
        return "config.json: auto_map asks for custom code, which is ignored: code of a model is never run here"
    return ""
