"""Records on disk how far 8-bit activations move the predictions of a model file that has no card."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from mycli.runtime.errors import ModelError
from mycli.runtime.hub.store import state_dir
from mycli.runtime.utils.files import write_atomic
from mycli.runtime.utils.json_fields import read_object

_ARITHMETIC = 1  # of 8-bit activations: a record of another one is not read
_FIELD = "kl"


def _path(file: Path) -> Path:
    info = file.stat()  # hashing the contents would take as long as loading them
    key = json.dumps([_ARITHMETIC, file.name, info.st_size, info.st_mtime_ns])
    return state_dir() / "activations" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def recorded_kl(file: Path) -> float | None:
    """Return the recorded KL divergence from 16-bit to 8-bit activations; None if there is no valid record."""
    try:
        return read_object(_path(file)).number(_FIELD, low=0)
    except (ModelError, OSError):
        return None


def record_kl(file: Path, kl: float) -> None:
    """Record the divergence, if it can be written."""
    with suppress(OSError):
        path = _path(file)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, json.dumps({"file": file.name, _FIELD: kl}).encode(), private=True)
