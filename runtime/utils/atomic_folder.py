"""Atomic creation of a folder: written under a temporary name, flushed to disk, then renamed.

`.NAME.lock` next to the target is locked meanwhile, so leftovers found under the lock belong to killed runs.
"""

import os
import re
import shutil
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from mycli.runtime.errors import UsageError
from mycli.runtime.utils.files import LockedError, disk_errors, flush, locked, require_space

# The folders in a model folder: of an embedding model's modules, and of named chat templates.
_INNER = re.compile(r"\d+_\w+|additional_chat_templates", re.ASCII)


def _check_target(target: Path, source: Path | None, overwrite: bool) -> None:
    if source is not None:
        inside, outside = Path(os.path.realpath(target)), Path(os.path.realpath(source))
        if inside == outside or outside in inside.parents or inside in outside.parents:
            raise UsageError(f"{target}: overlaps the input {source}", "choose a folder outside the input")
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise UsageError(f"{target}: exists already", code="target-exists")
    if target.is_symlink() or not target.is_dir():
        raise UsageError(f"{target}: not a folder", "only a model folder can be replaced; choose another name")
    entries = list(os.scandir(target))
    others = any(entry.is_dir() and not _INNER.fullmatch(entry.name) for entry in entries)
    if entries and ("config.json" not in {entry.name for entry in entries} or others):
        raise UsageError(f"{target}: not a model folder, so it is not replaced", "choose another name")


def _allocated(folder: Path) -> int:
    # Files of an unfinished run have holes.
    return sum(512 * path.stat().st_blocks for path in folder.iterdir()) if folder.is_dir() else 0


class Staging:
    """A context that creates `folder` for writing; `commit` renames it to `target`, otherwise it is removed on exit.

    resumable: the folder to write, on the disk of `target`, which stays as it is if the run ends before `commit`.
    Entering raises UsageError for an unsuitable or locked target, and ResourceError if less than `nbytes` are free.
    """

    def __init__(
        self,
        target: Path,
        nbytes: int,
        *,
        overwrite: bool = False,
        source: Path | None = None,
        resumable: Path | None = None,
    ) -> None:
        self.target = Path(os.path.abspath(os.path.expanduser(target)))
        self._nbytes = nbytes
        self._overwrite = overwrite
        self._source = source
        self._lock = ExitStack()
        # The process id is for a reader; the lock decides whether a run is alive.
        run = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        parent, prefix = self.target.parent, f".{self.target.name}"
        self._resumable = resumable is not None
        self.folder = resumable or parent / f"{prefix}.partial-{run}"
        self._replaced = parent / f"{prefix}.replaced-{run}"
        self._lock_path = parent / f"{prefix}.lock"

    def __enter__(self) -> Self:
        if "\0" in str(self.target) or not self.target.name:
            raise UsageError(f"{self.target}: not a possible name for a folder", "choose another name")
        with disk_errors(self.target), ExitStack() as entered:
            _check_target(self.target, self._source, self._overwrite)  # before anything is written
            self.target.parent.mkdir(parents=True, exist_ok=True)
            try:
                entered.enter_context(locked(self._lock_path, remove=True))
            except LockedError as lock:
                message = f"{self.target}: process {lock.holder} is writing it"
                raise UsageError(message, "wait for it, or choose another name") from None
            self._clean()
            _check_target(self.target, self._source, self._overwrite)
            require_space(self.target.parent, max(0, self._nbytes - _allocated(self.folder)))
            self.folder.mkdir(exist_ok=self._resumable)
            self._lock = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._resumable:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def _clean(self) -> None:
        leftover = re.compile(rf"\.{re.escape(self.target.name)}\.(partial|replaced)-\d+-[0-9a-f]{{12}}")
        for path in sorted(self.target.parent.iterdir()):
            match = leftover.fullmatch(path.name)
            if match and match[1] == "replaced" and not os.path.lexists(self.target):
                path.rename(self.target)  # the run was killed between its two renames
            elif match:
                shutil.rmtree(path)

    def commit(self) -> None:
        """Flush all files, then rename: after a power cut, `target` is the complete old or new folder."""
        with disk_errors(self.target):
            for path in self.folder.rglob("*"):
                flush(path)
            flush(self.folder)
            try:
                if self._overwrite and os.path.lexists(self.target):
                    self.target.rename(self._replaced)
                elif os.path.lexists(self.target):
                    raise UsageError(f"{self.target}: was created meanwhile", code="target-exists")
                self.folder.rename(self.target)
            except BaseException:
                if os.path.lexists(self._replaced) and not os.path.lexists(self.target):
                    self._replaced.rename(self.target)
                raise
            flush(self.target.parent)
            shutil.rmtree(self._replaced, ignore_errors=True)
