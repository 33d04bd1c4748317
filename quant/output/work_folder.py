"""The finished blocks of an interrupted run, one file each, so that the next run continues after them."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mycli.quant.output.model_card import Layer
from mycli.quant.rounding.grid import Quantized
from mycli.runtime.errors import UsageError
from mycli.runtime.utils.files import LockedError, disk_errors, locked, write_atomic

_RUN = "run.json"
_LOCK = "lock"
_BLOCKS = "block-*.safetensors"
_DERIVED = {"sha256", "mix"}  # of calibration text: they change with the number and length of its windows


@dataclass(frozen=True)
class Solved:
    """A solved block: its linears by name, other changed tensors by name, and the record of each linear."""

    linears: Mapping[str, Quantized]
    changed: Mapping[str, Tensor]
    layers: tuple[Layer, ...]


class WorkFolder:
    """Locks `folder` for one run, described by `run`, as a context manager; `restart`: drop its finished blocks first.

    Raises UsageError on entering if the folder belongs to a different run, or is in use.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any], *, restart: bool = False) -> None:
        self.folder = folder
        self._run = json.dumps(run, indent=1, sort_keys=True)
        self._restart = restart
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            with disk_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                entered.enter_context(_lock(self.folder))
                for left in self._unfinished():
                    left.unlink()
                for old in self._leftovers() if self._restart else ():
                    old.unlink(missing_ok=True)
            self._check_run()
            self._lock = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()

    def _leftovers(self) -> list[Path]:
        return [self.folder / _RUN, *self.folder.glob(_BLOCKS)]

    def _unfinished(self) -> list[Path]:
        # By a run that was killed while it wrote.
        return [path for name in (_RUN, _BLOCKS) for path in self.folder.glob(f".{name}.*.tmp")]

    def _check_run(self) -> None:
        path = self.folder / _RUN
        if not path.exists():
            if any(self.folder.glob(_BLOCKS)):
                raise UsageError(f"{self.folder} holds blocks of an unknown run", code="remove-work-folder")
            self._write(path, self._run.encode())
            return
        require_same_run(self.folder, json.loads(self._run))

    def load(self, block: int) -> Solved | None:
        path = self._path(block)
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
                records = json.loads(file.metadata()["layers"])
        except (SafetensorError, OSError, KeyError, ValueError):
            return None  # damaged by another program: the block is solved again
        layers = tuple(Layer(**record) for record in records)
        linears = {
            layer.name: Quantized(tensors.pop(f"{layer.name}.codes"), tensors.pop(f"{layer.name}.scales"))
            for layer in layers
        }
        return Solved(linears, tensors, layers)

    # A file appears by a rename after it was flushed: a run killed at any moment loses only the block it worked on.
    def save(self, block: int, solved: Solved) -> None:
        """Store a block; durable on return."""
        tensors = dict(solved.changed)
        for name, quantized in solved.linears.items():
            tensors[f"{name}.codes"] = quantized.codes.cpu().contiguous()
            tensors[f"{name}.scales"] = quantized.scales.cpu().contiguous()
        records = json.dumps([asdict(layer) for layer in solved.layers])
        self._write(self._path(block), save(tensors, {"layers": records}))

    def clear(self) -> None:
        # The user may have chosen a folder with other files. The model is complete: what cannot be removed stays.
        with suppress(OSError):
            for path in (*self._leftovers(), *self._unfinished(), self.folder / _LOCK):
                path.unlink(missing_ok=True)
            self.folder.rmdir()

    def _path(self, block: int) -> Path:
        return self.folder / f"block-{block:05}.safetensors"

    def _write(self, path: Path, data: bytes) -> None:
        with disk_errors(self.folder):
            write_atomic(path, data, durable=True)


def unwritten_bytes(folder: Path, nbytes: int) -> int:
    """Return how many of the `nbytes` of all blocks are not in `folder` yet."""
    return max(0, nbytes - sum(path.stat().st_size for path in folder.glob(_BLOCKS)))


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    try:
        with locked(folder / _LOCK):
            yield
    except LockedError:
        raise UsageError(f"{folder}: another process is using it", code="wait-or-other-work-folder") from None


def check_work_folder(folder: Path, run: Mapping[str, Any]) -> None:
    """Raise what `require_same_run` raises, before the folder is locked; of a folder in use, that it is in use."""
    try:
        require_same_run(folder, run)
    except UsageError:
        # The remedies for a different run drop its work, which a running process still adds to.
        with disk_errors(folder), _lock(folder):
            raise


def require_same_run(folder: Path, run: Mapping[str, Any]) -> None:
    """Raise UsageError if `folder` holds unfinished work that differs from `run` in one of the fields of `run`."""
    # Never mixed: blocks of another recipe, source or version would give a model of neither run.
    try:
        old = json.loads((folder / _RUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except ValueError:
        raise UsageError(f"{folder} holds blocks of an unknown run", code="remove-work-folder") from None
    versions = dict(old.pop("versions", {})), dict(run.get("versions", {}))
    changed = [name for name in versions[1] if versions[0].get(name) != versions[1][name]]
    begun, now = (" and ".join(f"{name} {side.get(name, 'unknown')}" for name in changed) for side in versions)
    reasons = [f"was begun with {begun}; this is {now}"] if changed else []
    others = {name: value for name, value in run.items() if name != "versions"}
    different: dict[str, str] = {}
    for name, difference in _differences({name: old.get(name) for name in others}, others):
        different.setdefault(name, difference)  # number and length of windows: of the calibration and of the recipe
    if different:
        reasons.append(f"differs in {'; '.join([*different.values()][:3])}")
    if reasons:
        raise UsageError(
            f"{folder} holds an unfinished run that {', and '.join(reasons)}", code="finish-or-remove-work"
        )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    different = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    for key in [key for key in different if key not in _DERIVED] or different:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{key} ")
        else:
            yield key, f"{prefix}{key} ({before} there, {after} now)"
