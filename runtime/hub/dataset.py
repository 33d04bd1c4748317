"""A file of text of a dataset on the hub: which one a name means, and how it comes into the Hugging Face cache.

Names are `org/name[@revision][:path]`; without a path a file is chosen, of the training split if one is called so.
Fetched and verified as models are (`runtime.hub.download`). Does not know what is in the file.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from mycli.runtime.errors import NotFoundError, UsageError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.download import Download, fetch_files, plan_files
from mycli.runtime.hub.names import DATASETS, safe_name, split_name
from mycli.runtime.hub.store import HubFile, read_ref, repo_folder

# What is chosen by itself, in this order; other names have to be given.
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".txt")


@dataclass(frozen=True)
class DatasetName:
    """`repo` as the hub's addresses have it, with `DATASETS` in front; `path` None: to be chosen."""

    text: str
    repo: str
    revision: str
    path: str | None

    @classmethod
    def parse(cls, text: str) -> "DatasetName":
        """Raises UsageError for what is no such name, before it can become a path or an address."""
        name, colon, path = text.partition(":")
        try:
            repo, revision = split_name(name)
        except UsageError:
            hint = "give it as hf:org/name[@revision][:path]"
            raise UsageError(f"hf:{text}: not a dataset of the hub", hint) from None
        if colon and not _safe_path(path):
            raise UsageError(f"hf:{text}: {path!r:.80} is not a path in a repository", "such as data/train.jsonl")
        return cls(text, f"{DATASETS}{repo}", revision or "main", path or None)

    def choose(self, paths: Iterable[str]) -> str:
        """The file meant. Raises NotFoundError where there is none, naming some of those that are there."""
        held = sorted(path for path in paths if _safe_path(path))
        if self.path is not None:
            if self.path in held:
                return self.path
            listed = ", ".join(held[:8]) + (f" and {len(held) - 8} more" if len(held) > 8 else "")
            raise NotFoundError(f"hf:{self.text}: no such file", f"there are {listed}")
        found = [path for path in held if path.endswith(SUFFIXES)]
        if not found:
            raise NotFoundError(f"hf:{self.text}: no {', '.join(SUFFIXES)} file", "name one: hf:org/name:path")
        return min(found, key=_rank)


def _rank(path: str) -> tuple[bool, int, str]:
    """Those of a training split first (train, train-00000-of-00004, but not constraints), then by `SUFFIXES`."""
    training = re.search(r"(?:^|[^a-z])train(?:[^a-z]|$)", path) is not None
    return not training, next(i for i, suffix in enumerate(SUFFIXES) if path.endswith(suffix)), path


def _safe_path(path: str) -> bool:
    return all(safe_name(part) for part in path.split("/")) and len(path) < 1024


def plan_dataset(hub: Hub, name: DatasetName) -> Download:
    """What to fetch: one file of the commit that the revision points to now.

    Raises NotFoundError, also for each failure of network and access in its own words.
    """

    def choose(_: str, files: tuple[HubFile, ...]) -> list[HubFile]:
        held = {file.name: file for file in files}
        return [held[name.choose(held)]]

    return plan_files(hub, f"hf:{name.text}", name.repo, name.revision, choose)


def cached_dataset(name: DatasetName) -> Path:
    """The file without asking the hub. Raises NotFoundError where it was not fetched before."""
    folder = repo_folder(name.repo)
    snapshot = folder / "snapshots" / (read_ref(folder, name.revision) or "none")
    held = {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}
    if not held:
        raise NotFoundError(f"hf:{name.text} is not on this machine", code="dataset-online")
    return snapshot / name.choose(held)


def fetch_dataset(hub: Hub, job: Download, advance: Callable[[float], None]) -> Path:
    """Do what `plan_dataset` said: the file in the cache. Raises what `fetch_files` raises."""
    return fetch_files(hub, job, force=False, advance=advance).folder / job.files[0].name
