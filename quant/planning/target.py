"""The place of a result, checked before anything is loaded: imports no torch."""

import os
from dataclasses import dataclass
from pathlib import Path

from mycli.runtime.checkpoint.model_folder import MAX_COMPANION_BYTES
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.store import RECORD
from mycli.runtime.utils.json_fields import read_object

SOURCE = "source"  # the folder in a work folder for what is read of a model on a hub


@dataclass(frozen=True)
class OutputTarget:
    """The folder or GGUF file that a quantization writes, and the work folder of its finished blocks until then."""

    path: Path
    overwrite: bool = False
    restart: bool = False  # without the finished blocks of an interrupted run
    work_dir: Path | None = None  # None: hidden, next to `path`

    @property
    def work_folder(self) -> Path:
        return self.work_dir or self.path.with_name(f".{self.path.name}.work")


def check_target(target: Path, overwrite: bool, source: Path | None = None) -> None:
    """Raise UsageError unless `target` is new or, with `overwrite`, a folder of this program, outside `source`."""
    resolved = target.resolve()
    if source is not None and source.resolve() in (resolved, *resolved.parents):
        raise UsageError(f"{target} is inside the model to be quantized", code="other-output")
    if not os.path.lexists(target):
        require_writable_parent(target)
        return
    foreign = _foreign(target)
    if foreign:
        raise UsageError(f"{target} exists and {foreign}, so it is not replaced", code="other-output")
    if not overwrite:
        raise UsageError(f"{target} exists already", code="target-exists")


def _foreign(target: Path) -> str:
    """Return why `target` may hold a user's own files, which replacing it would delete; "" if it does not."""
    if target.is_symlink() or not target.is_dir():
        return "is not a folder"
    names = {entry.name for entry in os.scandir(target)}
    if not names:
        return ""
    if RECORD not in names:
        return "was not written by this program"
    try:
        written = read_object(target / RECORD, MAX_COMPANION_BYTES).object("files").values
    except ModelError as error:
        return f"its {RECORD} cannot be read ({error.message})"
    others = sorted(names - {RECORD, *(name.partition("/")[0] for name in written)})
    return f"contains {others[0]}, which this program did not write" if others else ""


def require_writable_parent(folder: Path) -> None:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{folder}: {existing} cannot be written to", code="other-output")
