"""Reads tensors from GGUF files with the rows and values of Hugging Face, as blocks or as dense values.

A tensor is read a part at a time, except one whose rows are reordered.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mycli.runtime.checkpoint.gguf.architecture import Architecture, RowOrder, TensorRule
from mycli.runtime.checkpoint.gguf.blocks import dequantize_blocks
from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.reader import Checkpoint, check_finite
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.models.config import ModelConfig

_VALUES = 1 << 21  # decoded at a time: 8 MB of fp32


def file_order(order: RowOrder, config: ModelConfig, rows: int) -> Tensor:
    """Return the index in Hugging Face's order of each row of the file, int64 [rows]."""
    return torch.arange(rows).view(order.shape(config)).permute(order.axes).reshape(-1)


class GgufCheckpoint(Checkpoint):
    """Reads GGUF files as a `Checkpoint`: quantized tensors become dense ones in the model's dtype."""

    def __init__(
        self, manifest: Manifest, config: ModelConfig, architecture: Architecture, *, allow_nonfinite: bool = False
    ) -> None:
        super().__init__(manifest, allow_nonfinite=allow_nonfinite)
        self._config, self._architecture = config, architecture

    def dtype(self, name: str) -> torch.dtype:
        stored = TYPES_BY_NAME[self.entry(name).dtype].dtype
        return torch_dtype(stored or self._config.dtype)

    def row_bytes(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield each part of a tensor as its first row and uint8 [rows, bytes], valid until the next part."""
        entry = self.entry(name)
        rows = entry.shape[0]
        width, columns = entry.nbytes // rows, entry.shape[1] if len(entry.shape) == 2 else 1
        file = self.manifest.files[entry.file]
        part_rows = max(1, _VALUES // columns)
        row_order = self._rule(name).row_order
        order = None if row_order is None else file_order(row_order, self._config, rows).argsort()
        whole = None
        if order is not None:
            whole = torch.empty(rows, width, dtype=torch.uint8)
            file.read_into(whole.numpy().reshape(-1).data, entry.offset)
        part = torch.empty(min(part_rows, rows), width, dtype=torch.uint8)
        for start in range(0, rows, part_rows):
            data = part[: min(part_rows, rows - start)]
            if whole is not None and order is not None:
                torch.index_select(whole, 0, order[start : start + len(data)], out=data)
            else:
                file.read_into(data.numpy().reshape(-1).data, entry.offset + start * width)
            yield start, data

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor into `out`, contiguous on the CPU; values that `out` cannot hold are rounded."""
        entry, change = self.entry(name), self._rule(name).change
        if out.shape != entry.shape or not out.is_contiguous():
            raise ValueError(f"{name} is {entry.shape}, not {tuple(out.shape)}, contiguous")
        rows = out.view(entry.shape[0], -1)
        for start, data in self.row_bytes(name):
            values = dequantize_blocks(data, entry.dtype)
            rows[start : start + len(data)] = values if change is None else change.load(values)
        if not self._allow_nonfinite:
            check_finite(out, f"{entry.file}: {entry.name}", code="allow-nonfinite")

    def _rule(self, name: str) -> TensorRule:
        place = self._architecture.place(name)
        assert place is not None  # the manifest has only tensors with a rule
        return place.rule
