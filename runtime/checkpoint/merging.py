"""A checkpoint with a LoRA adapter added to its weights: sums are made while reading, a few rows at once.

They are in fp32 and rounded once, to the dtype that the model's weight is stored in, as PEFT's `merge_and_unload` makes
them. Does not know files, nor which names fit.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mycli.runtime.checkpoint.adapter import Adapter, LowRank
from mycli.runtime.checkpoint.reader import Checkpoint, tensor_bytes

_VALUES = 1 << 20  # of the added part at a time


class MergedCheckpoint(Checkpoint):
    """The tensors of `base`, changed as `adapter` says. Safe to use from several threads, as `base` is."""

    def __init__(self, base: Checkpoint, adapter: Adapter, *, allow_nonfinite: bool = False) -> None:
        super().__init__(base.manifest, allow_nonfinite=allow_nonfinite)
        self._base, self._adapter = base, adapter
        self._changes = Checkpoint(adapter.manifest, allow_nonfinite=allow_nonfinite)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor as `base` reads it."""
        return self._base.dtype(name)

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor as `base` does, then change it. Raises ModelError where it is no longer finite, too."""
        stored, added = self._adapter.instead.get(name), self._adapter.added.get(name)
        if stored is not None:
            out.copy_(self._changes.read(stored))
        else:
            self._base.read_into(name, out)
        if added is not None:
            self._add(out, added)
        if stored is not None or added is not None:
            self.check(out, f"{name} with the adapter")

    def chunks(self, name: str) -> Iterator[memoryview]:
        """The bytes of a tensor; of a changed one at once."""
        if name in self._adapter.added or name in self._adapter.instead:
            return iter([tensor_bytes(self.read(name))])
        return self._base.chunks(name)

    def _add(self, weight: Tensor, added: LowRank) -> None:
        a, b = (self._changes.read(name).float() for name in (added.a, added.b))
        rows = max(1, _VALUES // weight.shape[1])
        for start in range(0, len(weight), rows):
            part = weight[start : start + rows]
            part.copy_((b[start : start + rows] @ a).mul_(added.scale).add_(part))
