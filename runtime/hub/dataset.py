"""Text files of hub datasets, named `org/name[@revision][:path]`: chosen, then downloaded and verified like a model."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from mycli.runtime.errors import NotFoundError, UsageError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.download import DownloadPlan, fetch_files, plan_files
from mycli.runtime.hub.names import DATASETS, safe_path, split_name
from mycli.runtime.hub.store import HubFile, read_ref, repo_folder

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".txt")  # of a file chosen without a path, in this order


@dataclass(frozen=True)
class DatasetName:
    """A parsed name. repo: with the prefix `DATASETS`; path: None to choose a file."""

    text: str
    repo: str
    revision: str
    path: str | None

    @classmethod
    def parse(cls, text: str) -> "DatasetName":
        """Parse a name. Raises UsageError for anything that could act as a path or alter a URL."""
        name, colon, path = text.partition(":")
        try:
            repo, revision = split_name(name)
        except UsageError:
            hint = "give it as hf:org/name[@revision][:path]"
            raise UsageError(f"hf:{text}: not a dataset of the hub", hint) from None
        if colon and not safe_path(path):
            raise UsageError(f"hf:{text}: {path!r:.80} is not a path in a repository", "such as data/train.jsonl")
        return cls(text, f"{DATASETS}{repo}", revision or "main", path or None)

    def choose(self, paths: Iterable[str]) -> str:
        """Return the file to read, of the training split if there is one. Raises NotFoundError."""
        paths = sorted(filter(safe_path, paths))
        if self.path is None:
            candidates = [path for path in paths if path.endswith(SUFFIXES)]
            if not candidates:
                raise NotFoundError(f"hf:{self.text}: no {', '.join(SUFFIXES)} file", "name one: hf:org/name:path")
            return min(candidates, key=_rank)
        if self.path not in paths:
            listed = ", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")
            raise NotFoundError(f"hf:{self.text}: no such file", f"there are {listed}")
        return self.path


def _rank(path: str) -> tuple[bool, int, str]:
    # "train" as a word: train-00000-of-00004 counts, constraints does not.
    training = re.search(r"(?:^|[^a-z])train(?:[^a-z]|$)", path) is not None
    return not training, next(i for i, suffix in enumerate(SUFFIXES) if path.endswith(suffix)), path


def plan_dataset(hub: Hub, name: DatasetName) -> DownloadPlan:
    """Return the plan for one file. Raises NotFoundError for network and access failures."""

    def choose(_: str, files: tuple[HubFile, ...]) -> list[HubFile]:
        by_name = {file.name: file for file in files}
        return [by_name[name.choose(by_name)]]

    return plan_files(hub, f"hf:{name.text}", name.repo, name.revision, choose)


def cached_dataset(name: DatasetName) -> Path:
    folder = repo_folder(name.repo)
    snapshot = folder / "snapshots" / (read_ref(folder, name.revision) or "none")
    paths = {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}
    if not paths:
        raise NotFoundError(f"hf:{name.text} is not on this machine", code="dataset-online")
    return snapshot / name.choose(paths)


def fetch_dataset(hub: Hub, plan: DownloadPlan, advance: Callable[[float], None]) -> Path:
    return fetch_files(hub, plan, force=False, advance=advance).folder / plan.files[0].name
