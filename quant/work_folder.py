"""What is done already, on disk: the solved blocks of an interrupted run, so that the next one goes on after them.

A folder beside the target holds one file a block and `run.json`, which says what run they are of; work of another
recipe, source or version is refused, never mixed. A file appears whole, by rename, after it was flushed: a run killed
at any moment loses the block it was at. Knows nothing of how blocks are solved.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mycli.quant.model_card import Layer
from mycli.quant.rounding.grid import Quantized
from mycli.runtime.errors import UsageError
from mycli.runtime.utils.files import LockedError, disk_errors, locked, write_atomic

_RUN = "run.json"
_LOCK = "lock"


@dataclass(frozen=True)
class Solved:
    """A block: its linears by name, tensors of it that were changed besides, and what is to be said of each linear."""

    linears: Mapping[str, Quantized]
    changed: Mapping[str, Tensor]
    layers: tuple[Layer, ...]


class WorkFolder:
    """A context that holds `folder` for one run, described by `run`; see `clear` for its end.

    Raises UsageError on entering where the folder is of another run, or in use.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        self.folder = folder
        self._run = json.dumps(run, indent=1, sort_keys=True)
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            with disk_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                try:
                    entered.enter_context(locked(self.folder / _LOCK))
                except LockedError:
                    message = f"{self.folder}: another process works in it"
                    raise UsageError(message, code="wait-or-other-work-folder") from None
                for left in self.folder.glob(".*.tmp"):  # by a run that was killed while it wrote
                    left.unlink()
            self._check_run()
            self._lock = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()

    def _check_run(self) -> None:
        path = self.folder / _RUN
        if not path.exists():
            if any(self.folder.glob("block-*.safetensors")):
                raise UsageError(f"{self.folder}: blocks of an unknown run", code="remove-work-folder")
            self._write(path, self._run.encode())
            return
        old, new = json.loads(path.read_text(encoding="utf-8")), json.loads(self._run)
        changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        if changed:
            raise UsageError(
                f"{self.folder} holds unfinished work that differs in: {', '.join(changed)}",
                code="finish-or-remove-work",
            )

    def load(self, block: int) -> Solved | None:
        """What `save` was given, None where the block is not done."""
        path = self._path(block)
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
                told = json.loads(file.metadata()["layers"])
        except (SafetensorError, OSError, KeyError, ValueError):
            return None  # damaged by something else than us: it is solved again
        layers = tuple(Layer(**layer) for layer in told)
        linears = {
            layer.name: Quantized(tensors.pop(f"{layer.name}.codes"), tensors.pop(f"{layer.name}.scales"))
            for layer in layers
        }
        return Solved(linears, tensors, layers)

    def save(self, block: int, solved: Solved) -> None:
        """Keep a block; it is there after this, whatever happens."""
        tensors = dict(solved.changed)
        for name, quantized in solved.linears.items():
            tensors[f"{name}.codes"] = quantized.codes.cpu().contiguous()
            tensors[f"{name}.scales"] = quantized.scales.cpu().contiguous()
        told = json.dumps([asdict(layer) for layer in solved.layers])
        self._write(self._path(block), save(tensors, {"layers": told}))

    def clear(self) -> None:
        """Remove the folder: its work is in the target now."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, block: int) -> Path:
        return self.folder / f"block-{block:05}.safetensors"

    def _write(self, path: Path, data: bytes) -> None:
        with disk_errors(self.folder):
            write_atomic(path, data, durable=True)
