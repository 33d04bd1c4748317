"""A folder that appears whole or not at all: made beside its target, flushed to disk, then renamed once.

While one is being made, `.NAME.lock` beside the target is locked (flock: the system frees it when its holder dies,
however it dies). Whoever holds the lock knows that leftovers of other runs belong to nobody. Knows files and folders,
nothing of models beyond telling a model folder from one that must never be replaced. POSIX only; no torch.
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


def _check_place(target: Path, source: Path | None, overwrite: bool) -> None:
    """Refuse a target that is, holds or lies in `source`, or that stands there and is not ours to replace."""
    if source is not None:
        inside, outside = Path(os.path.realpath(target)), Path(os.path.realpath(source))
        if inside == outside or outside in inside.parents or inside in outside.parents:
            raise UsageError(f"{target}: overlaps the input {source}", "choose an output folder beside it")
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise UsageError(f"{target}: exists already", code="target-exists")
    if target.is_symlink() or not target.is_dir():
        raise UsageError(f"{target}: not a folder", "only a model folder can be replaced; choose another name")
    entries = list(os.scandir(target))
    if entries and ("config.json" not in {entry.name for entry in entries} or any(map(os.DirEntry.is_dir, entries))):
        raise UsageError(f"{target}: not a model folder, so it is not replaced", "choose another name")


class Staging:
    """A context in which `folder` may be filled; `commit` makes it `target`, leaving the context any other way nothing.

    Entering checks `nbytes` against the free space, and clears away what a killed run of the same target left behind.
    Raises UsageError for a target that cannot be written, exists (unless `overwrite`), overlaps `source` or is being
    written by another process; ResourceError for too little space.
    """

    def __init__(self, target: Path, nbytes: int, *, overwrite: bool = False, source: Path | None = None) -> None:
        self.target = Path(os.path.abspath(os.path.expanduser(target)))
        self._nbytes = nbytes
        self._overwrite = overwrite
        self._source = source
        self._lock = ExitStack()
        # The process is for a person to read: only the lock tells whether a run is alive.
        run = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.folder, self._replaced, self._lock_path = (
            self.target.parent / f".{self.target.name}.{kind}" for kind in (f"partial-{run}", f"replaced-{run}", "lock")
        )

    def __enter__(self) -> Self:
        if "\0" in str(self.target) or not self.target.name:
            raise UsageError(f"{self.target}: not a possible name for a folder", "choose another name")
        with disk_errors(self.target), ExitStack() as entered:
            _check_place(self.target, self._source, self._overwrite)  # before anything is written anywhere
            self.target.parent.mkdir(parents=True, exist_ok=True)
            try:
                entered.enter_context(locked(self._lock_path, remove=True))
            except LockedError as lock:
                message = f"{self.target}: process {lock.holder} is writing it"
                raise UsageError(message, "wait for it, or choose another name") from None
            self._clean()
            _check_place(self.target, self._source, self._overwrite)
            require_space(self.target.parent, self._nbytes)
            self.folder.mkdir()
            self._lock = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def _clean(self) -> None:
        """Put back a folder whose replacement never came, remove all other leftovers."""
        leftover = re.compile(rf"\.{re.escape(self.target.name)}\.(partial|replaced)-\d+-[0-9a-f]{{12}}")
        for path in sorted(self.target.parent.iterdir()):
            match = leftover.fullmatch(path.name)
            if match and match[1] == "replaced" and not os.path.lexists(self.target):
                path.rename(self.target)
            elif match:
                shutil.rmtree(path)

    def commit(self) -> None:
        """Flush everything to disk, then rename: after a power cut the target is the old or the new folder, whole."""
        with disk_errors(self.target):
            for path in self.folder.iterdir():
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
