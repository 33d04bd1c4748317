"""Storage of models on this machine: built-in ones, quantized ones, and the Hugging Face cache.

The cache's layout is huggingface_hub's: `models--org--name/{refs,blobs,snapshots,trees}`. It is read without importing
that library, which takes longer than a light command may.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mycli.runtime.checkpoint.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MLX_WEIGHTS, is_adapter
from mycli.runtime.checkpoint.gguf_parts import part_number
from mycli.runtime.checkpoint.safetensors_header import INDEX, SINGLE, index_counts
from mycli.runtime.checkpoint.sentence_transformers import MODULE_FILE, MODULES
from mycli.runtime.errors import ModelError
from mycli.runtime.hub.names import DATASETS, GGUF, REPO, safe_name
from mycli.runtime.tokenizer.tekken import TEKKEN_FILE
from mycli.runtime.utils.files import expand_user
from mycli.runtime.utils.json_fields import Fields, read_object

MAX_INDEX_BYTES = 32 << 20
MAX_TREE_BYTES = 64 << 20
BUILT_IN = ("pico", "pico-draft")
RECORD = "mycli.json"  # written by `quantize`: scheme, sizes and hashes
MAX_RECORD_BYTES = 16 << 20
# Files a model needs besides config.json and the weights, if its commit holds them.
ESSENTIAL = frozenset(
    {"tokenizer.json", TEKKEN_FILE, "tokenizer_config.json", "generation_config.json", "chat_template.jinja", INDEX}
)
# Both become file names in the cache, so anything else is refused.
COMMIT = re.compile(r"[0-9a-f]{40}")
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# An image projector, an importance matrix, or a model that only drafts for another one.
_NO_MODEL = re.compile(r"(?i:mmproj|imatrix)|^(?:mtp|eagle3|dflash|dspark)-")


def gguf_record(file: Path) -> Path:
    """The record of a GGUF file that was written by `quantize`, next to it."""
    return file.with_suffix(f".{RECORD}")


@dataclass(frozen=True)
class HubFile:
    """A file of a commit. `digest`: sha256 (64 hex digits), or for small files git's sha1 of the blob (40)."""

    name: str
    size: int
    digest: str

    def hasher(self) -> "hashlib._Hash":
        """Return a new hash object whose digest over the file's contents must equal `digest`."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)


def _directory(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default)


def data_dir() -> Path:
    """Return the folder of quantized models (in `models/NAME`): $MYCLI_HOME, else `mycli` under $XDG_DATA_HOME."""
    configured = os.environ.get("MYCLI_HOME")
    return expand_user(configured) if configured else _directory("XDG_DATA_HOME", ".local/share") / "mycli"


def state_dir() -> Path:
    """Return the folder of history and benchmark records: `mycli` under $XDG_STATE_HOME."""
    return _directory("XDG_STATE_HOME", ".local/state") / "mycli"


def hub_cache() -> Path:
    configured = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if not configured:
        base = os.environ.get("HF_HOME") or _directory("XDG_CACHE_HOME", ".cache") / "huggingface"
        configured = os.path.join(base, "hub")
    return expand_user(os.path.expandvars(configured))


def repo_folder(repo: str) -> Path:
    kind = "" if repo.startswith(DATASETS) else "models--"
    return hub_cache() / (kind + repo.replace("/", "--"))


def built_in_folder(name: str) -> Path:
    return Path(__file__).parents[1] / "pico" / name


def file_bytes(path: Path) -> int:
    """Return the size of a file; 0 if it is missing or a dangling link."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def list_folder(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the entries of `folder`, unsorted; none if it cannot be read."""
    try:
        return list(folder.glob(pattern))
    except OSError:
        return []


def parse_tree(records: Fields) -> tuple[HubFile, ...]:
    """Return the files of a commit from the format of `trees/`. Raises ModelError for a malformed entry."""
    files = []
    for name in records.values:
        entry = records.object(name)
        size = entry.integer("lfs_size", entry.integer("size", low=0, high=1 << 60), low=0, high=1 << 60)
        digest = entry.text("lfs_sha256", entry.text("blob_id"))
        # Anything else could name a path outside `blobs/`.
        if DIGEST.fullmatch(digest):
            files.append(HubFile(name, size, digest))
    return tuple(files)


def read_tree(folder: Path, commit: str) -> tuple[HubFile, ...] | None:
    """Return the files of `commit` recorded under the repository's cache `folder`; None without a valid record."""
    try:
        return parse_tree(read_object(folder / "trees" / f"{commit}.json", MAX_TREE_BYTES).object("files"))
    except ModelError:
        return None


def read_shards(index: Fields) -> tuple[str, ...]:
    """Return the shard names of a safetensors index, sorted. Raises ModelError for paths and other formats."""
    names = set()
    for shard in index.object("weight_map").values.values():
        if not isinstance(shard, str) or not safe_name(shard) or not shard.endswith(".safetensors"):
            raise index.fail(
                "weight_map", f"names {str(shard)!r:.80}, which is not a safetensors file of the same folder"
            )
        names.add(shard)
    if not names:
        raise index.fail("weight_map", "is empty")
    return tuple(sorted(names))


def missing_files(folder: Path, tree: Iterable[HubFile] | None) -> list[str]:
    """Return the files that the model or adapter in `folder` lacks; `tree`: the files of its commit, if known."""
    names = {file.name for file in tree or ()}
    if is_adapter(folder) or has_adapter_files(names):
        kinds = (ADAPTER_WEIGHTS, MLX_WEIGHTS)
        needed = {ADAPTER_CONFIG, next((n for n in kinds if n in names or (folder / n).exists()), ADAPTER_WEIGHTS)}
    else:
        needed = {"config.json"} | (ESSENTIAL & names)
        if "tokenizer.json" in names:
            needed.discard(TEKKEN_FILE)
        if (folder / MODULES).exists():
            needed |= set(filter(MODULE_FILE.fullmatch, names))
        if (folder / INDEX).exists():
            shards = read_shards(read_object(folder / INDEX, MAX_INDEX_BYTES))
            if index_counts(shards, [name for name in (SINGLE, *shards) if (folder / name).exists()]):
                needed |= set(shards)
        elif (folder / SINGLE).exists():
            needed.discard(INDEX)
        elif INDEX not in needed:
            needed.add(SINGLE)
    return sorted(name for name in needed if not (folder / name).exists())


def has_adapter_files(names: Iterable[str]) -> bool:
    """Return whether files of these names make a LoRA adapter and not a model."""
    names = set(names)
    return ADAPTER_CONFIG in names and "config.json" not in names


def gguf_files(names: Iterable[str]) -> list[str]:
    """Return the GGUF models among `names` or paths, sorted: whole files and first parts.

    Files that only accompany a model are left out, by the words in their names that llama.cpp looks for.
    """
    models = (name for name in names if name.endswith(GGUF) and not _NO_MODEL.search(name.rpartition("/")[2]))
    return sorted(name for name in models if part_number(name) in (None, 1))


def gguf_files_in(folder: Path) -> list[str]:
    """Return `gguf_files` of a folder and the folders in it, where repositories keep the parts of large models."""
    paths = [path for pattern in ("*.gguf", "*/*.gguf") for path in list_folder(folder, pattern)]
    return gguf_files(path.relative_to(folder).as_posix() for path in paths)


def commits(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the commits in the repository's cache `folder`, each with the branches and tags that point to it."""
    paths = [*list_folder(folder / "snapshots"), *list_folder(folder / "trees")]
    names = (path.name.removesuffix(".json") for path in paths)
    revisions: dict[str, list[str]] = {name: [] for name in names if COMMIT.fullmatch(name)}
    for path in sorted((folder / "refs").rglob("*")):
        revision = str(path.relative_to(folder / "refs"))
        if (commit := read_ref(folder, revision)) in revisions:
            revisions[commit].append(revision)
    return {commit: tuple(names) for commit, names in revisions.items()}


def read_ref(folder: Path, revision: str) -> str | None:
    """Return the commit that a branch or tag pointed to at the last download; a commit is returned unchanged."""
    if COMMIT.fullmatch(revision):
        return revision
    try:
        commit = (folder / "refs" / revision).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) else None


def local_model_names() -> list[str]:
    """Return the names of all models on this machine, for completion and hints."""
    return [*BUILT_IN, *quantized_models(), *cached_repos()]


def quantized_models() -> list[str]:
    return [name for name in model_folders() if (data_dir() / "models" / name / "config.json").is_file()]


def model_folders() -> list[str]:
    """Return the names of all folders of quantized models, damaged ones included."""
    folders = list_folder(data_dir() / "models")
    return sorted(p.name for p in folders if not p.name.startswith(".") and (p.is_dir() or p.is_symlink()))


def cached_repos() -> list[str]:
    names = (path.name.removeprefix("models--").replace("--", "/") for path in list_folder(hub_cache(), "models--*"))
    return sorted(name for name in names if REPO.fullmatch(name))
