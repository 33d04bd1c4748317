"""Tensors from GGUF files: blocks of rows in the order of Hugging Face, and dense values of whatever is stored.

Undoes what llama.cpp's converters did to the weights: rows of q and k reordered for rotation in pairs, norms stored as
1 + w. A part of a tensor is in memory at a time, except where its rows must be reordered. Does not know which tensors a
model needs, nor how packed weights are laid out for kernels.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mycli.runtime.checkpoint.gguf.architectures import Architecture
from mycli.runtime.checkpoint.gguf.blocks import dequantize_blocks
from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.reader import Checkpoint, check_finite
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.models.config import ModelConfig

_VALUES = 1 << 21  # decoded at a time


def halves_order(rows: int, heads: int) -> Tensor:
    """Where each row of q or k stands in the file: there the two of a pair lie side by side, here half a head apart."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def pairs_order(rows: int, heads: int) -> Tensor:
    """The inverse: where each row of the file stands here."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).reshape(-1)


class GgufCheckpoint(Checkpoint):
    """A `Checkpoint` of GGUF files. Quantized tensors are read as dense ones in the dtype of the model."""

    def __init__(
        self, manifest: Manifest, config: ModelConfig, architecture: Architecture, *, allow_nonfinite: bool = False
    ) -> None:
        super().__init__(manifest, allow_nonfinite=allow_nonfinite)
        self._config, self._architecture = config, architecture

    def dtype(self, name: str) -> torch.dtype:
        """What `read` gives: plain numbers as stored, all else in the model's dtype."""
        stored = TYPES_BY_NAME[self.entry(name).dtype].dtype
        return torch_dtype(stored or self._config.dtype)

    def row_bytes(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """A tensor in parts, each with the number of its first row: uint8 [rows, bytes], valid until the next."""
        entry = self.entry(name)
        rows = entry.shape[0]
        width, columns = entry.nbytes // rows, entry.shape[1] if len(entry.shape) == 2 else 1
        file = self.manifest.files[entry.file]
        at_once = max(1, _VALUES // columns)
        order = self._order(name, rows)
        whole = None
        if order is not None:
            whole = torch.empty(rows, width, dtype=torch.uint8)
            file.read_into(whole.numpy().reshape(-1).data, entry.offset)
        part = torch.empty(min(at_once, rows), width, dtype=torch.uint8)
        for start in range(0, rows, at_once):
            data = part[: min(at_once, rows - start)]
            if whole is not None and order is not None:
                torch.index_select(whole, 0, order[start : start + len(data)], out=data)
            else:
                file.read_into(data.numpy().reshape(-1).data, entry.offset + start * width)
            yield start, data

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor into `out`, as `Checkpoint.read_into`; values that `out` cannot hold are rounded."""
        entry, shift = self.entry(name), self._shift(name)
        if out.shape != entry.shape or not out.is_contiguous():
            raise ValueError(f"{name} is {entry.shape}, not {tuple(out.shape)}, contiguous")
        rows = out.view(entry.shape[0], -1)
        for start, data in self.row_bytes(name):
            values = dequantize_blocks(data, entry.dtype)
            rows[start : start + len(data)] = values - shift if shift else values
        if not self._allow_nonfinite:
            check_finite(out, f"{entry.file}: {entry.name}", code="allow-nonfinite")

    def _shift(self, name: str) -> float:
        return self._architecture.norm_shift if name.endswith("norm.weight") else 0.0

    def _order(self, name: str, rows: int) -> Tensor | None:
        if not self._architecture.is_paired(name):
            return None
        return halves_order(rows, self._config.heads if ".q_proj." in name else self._config.kv_heads)
