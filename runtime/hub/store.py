"""Where models lie on this machine: built in, quantized here, and in the Hugging Face cache.

Reads the cache as other tools write it: `models--org--name/{refs,blobs,snapshots,trees}`. Knows no network (that is
`runtime.hub.client` and `download`), no torch, and not what a name means (`runtime.hub.resolve`).
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mycli.runtime.checkpoint.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_adapter
from mycli.runtime.checkpoint.gguf.files import part_number
from mycli.runtime.checkpoint.safetensors_header import INDEX, SINGLE
from mycli.runtime.errors import ModelError
from mycli.runtime.hub.names import (
    DATASETS,
    GGUF,
    REPO,
    safe_name,
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
class HubFile:
    """A file of a commit. `digest`: sha256 (64 hex digits), or for small files git's sha1 of the blob (40)."""

    name: str
    size: int
    digest: str


def _directory(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default)


def data_dir() -> Path:
    """Where quantized models live, in `models/NAME`: $MYCLI_HOME, else `mycli` under $XDG_DATA_HOME."""
    chosen = os.environ.get("MYCLI_HOME")
    return Path(chosen).expanduser() if chosen else _directory("XDG_DATA_HOME", ".local/share") / "mycli"


def state_dir() -> Path:
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


def commits(folder: Path) -> dict[str, tuple[str, ...]]:
    """Commits of which the repository's cache `folder` holds anything, with the branches and tags that point there."""
    paths = [*children(folder / "snapshots"), *children(folder / "trees")]
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


def local_model_names() -> list[str]:
    """Names of all models on this machine: built in, quantized here, and in the cache; for completion and hints."""
    return [*BUILT_IN, *quantized(), *cached_repos()]


def quantized() -> list[str]:
    """Names of the models quantized here."""
    return [name for name in stored() if (data_dir() / "models" / name / "config.json").is_file()]


def stored() -> list[str]:
    """Names of all folders where models quantized here lie, whatever became of what is in them."""
    folders = children(data_dir() / "models")
    return sorted(p.name for p in folders if not p.name.startswith(".") and (p.is_dir() or p.is_symlink()))


def cached_repos() -> list[str]:
    """`org/name` of the model repositories in the Hugging Face cache."""
    names = (path.name.removeprefix("models--").replace("--", "/") for path in children(hub_cache(), "models--*"))
    return sorted(name for name in names if REPO.fullmatch(name))


def children(folder: Path, pattern: str = "*") -> list[Path]:
    """What lies in `folder`, unsorted; nothing for one that may not be read."""
    try:
        return list(folder.glob(pattern))
    except OSError:
        return []
