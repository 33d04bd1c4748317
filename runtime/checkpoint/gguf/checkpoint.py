"""Reads tensors from GGUF files with the rows and values of Hugging Face, as blocks or as dense values.

A tensor is read a part at a time, except one whose rows are reordered.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.blocks import dequantize_blocks
from mycli.runtime.checkpoint.gguf.tensor_rules import RowOrder, RowRanges, TensorRule
from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.reader import Checkpoint, check_finite
from mycli.runtime.checkpoint.safetensors_header import TensorEntry
from mycli.runtime.checkpoint.stable_file import RegularFile
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig

_VALUES = 1 << 19  # decoded at a time: 2 MB of fp32
_PART = 1 << 21  # values of blocks that are read at a time: more calls took up to half again as long


def file_order(order: RowOrder | RowRanges, config: ModelConfig, rows: int) -> Tensor:
    """Return the index in Hugging Face's order of each row of the file, int64 [rows].

    Raises ModelError if the order does not fit the number of rows.
    """
    if isinstance(order, RowRanges):
        indices = torch.cat([torch.arange(part.start, part.stop, part.step) for part in order.ranges(config)])
        if len(indices) != rows:
            raise ModelError(f"a tensor of {rows} rows, expected {len(indices)}", code="pull-again")
        return indices
    return torch.arange(rows).view(order.shape(config)).permute(order.axes).reshape(-1)


def read_matrix(path: Path, entry: TensorEntry) -> Tensor:
    """Return a matrix of the file `path` in fp32."""
    rows, columns = entry.shape
    data = torch.empty(rows, entry.nbytes // rows, dtype=torch.uint8)
    RegularFile.find(path).read_into(data.numpy().reshape(-1).data, entry.offset)
    weight = dequantize_blocks(data, entry.dtype).view(rows, columns).float()
    check_finite(weight, f"{entry.file}: {entry.name}", code="allow-nonfinite")
    return weight


class GgufCheckpoint(Checkpoint):
    """Reads GGUF files as a `Checkpoint`: quantized tensors become dense ones of `dtype`, by default the config's."""

    def __init__(
        self,
        manifest: Manifest,
        config: ModelConfig,
        architecture: Architecture,
        joined: Mapping[str, tuple[TensorEntry, ...]] | None = None,
        factors: Mapping[str, float] | None = None,
        *,
        dtype: torch.dtype | None = None,
        allow_nonfinite: bool = False,
    ) -> None:
        super().__init__(manifest, allow_nonfinite=allow_nonfinite)
        self._dense_dtype = dtype or torch_dtype(config.dtype)
        self._config, self.architecture, self._joined = config, architecture, joined or {}
        self.factors = factors or {}  # of the values in the file, by name; NVFP4 has some

    def dtype(self, name: str) -> torch.dtype:
        stored = TYPES_BY_NAME[self.entry(name).dtype].dtype
        return self._dense_dtype if stored is None else torch_dtype(stored)

    def row_bytes(self, name: str, values: int = _PART) -> Iterator[tuple[int, Tensor]]:
        """Yield parts of about `values` as their first row and uint8 [rows, bytes], each valid until the next."""
        entry = self.entry(name)
        rows = entry.shape[0] if entry.shape else 1
        width, columns = entry.nbytes // rows, max(1, prod(entry.shape[1:]))
        file = self.manifest.files[entry.file]
        part_rows = max(1, values // columns)
        row_order = self._rule(name).row_order
        order = None if row_order is None else file_order(row_order, self._config, rows).argsort()
        whole = None
        if order is not None or name in self._joined:
            whole, start = torch.empty(rows, width, dtype=torch.uint8), 0
            for stored in self._joined.get(name, (entry,)):
                end = start + stored.nbytes
                file.read_into(whole.view(-1)[start:end].numpy().data, stored.offset, self._cancelled)
                start = end
            order = torch.arange(rows) if order is None else order
        part = torch.empty(min(part_rows, rows), width, dtype=torch.uint8)
        for start in range(0, rows, part_rows):
            data = part[: min(part_rows, rows - start)]
            if whole is not None and order is not None:
                torch.index_select(whole, 0, order[start : start + len(data)], out=data)
            else:
                file.read_into(data.numpy().reshape(-1).data, entry.offset + start * width, self._cancelled)
            yield start, data

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor into `out`, contiguous on the CPU; values that `out` cannot hold are rounded."""
        entry, change, factor = self.entry(name), self._rule(name).change, self.factors.get(name, 1.0)
        if out.shape != entry.shape or not out.is_contiguous():
            raise ValueError(f"{name} is {entry.shape}, not {tuple(out.shape)}, contiguous")
        if self._rule(name).by_head and name in self._joined:
            self._read_by_head(name, out)
            return
        rows, columns = out.view(*entry.shape[:1], -1), self.column_order(name)
        for start, data in self.row_bytes(name, _VALUES):
            values = dequantize_blocks(data, entry.dtype) * factor
            if columns is not None:
                values = values[:, columns]
            rows[start : start + len(data)] = values if change is None else change.load(values)
        self.check(out, f"{entry.file}: {entry.name}")

    def _read_by_head(self, name: str, out: Tensor) -> None:
        keys, values = (self._dense(entry) for entry in self._joined[name])
        if keys.shape[0] != values.shape[0] or keys.shape[1] != values.shape[2]:
            problem = f"{keys.shape[0]} heads of {keys.shape[1]} columns, its other half {tuple(values.shape)}"
            raise ModelError(f"{self._joined[name][0].name}: {problem}", code="pull-again")
        out.copy_(torch.cat((keys.transpose(1, 2), values), dim=1).reshape(out.shape) * self.factors.get(name, 1.0))
        self.check(out, name)

    def _dense(self, entry: TensorEntry) -> Tensor:
        rows = prod(entry.shape[:-1])
        data = torch.empty(rows, entry.nbytes // rows, dtype=torch.uint8)
        self.manifest.files[entry.file].read_into(data.numpy().reshape(-1).data, entry.offset, self._cancelled)
        return dequantize_blocks(data, entry.dtype).view(entry.shape)

    def column_order(self, name: str) -> Tensor | None:
        """Return the column of the file for each column of the tensor, None where they are the same."""
        order = self._rule(name).column_order
        return None if order is None else file_order(order, self._config, self.entry(name).shape[1]).argsort()

    def _rule(self, name: str) -> TensorRule:
        place = self.architecture.place(name, self.entry(name).name)
        assert place is not None  # the manifest has only tensors with a rule
        return place.rule


class GgufAdapterCheckpoint(GgufCheckpoint):
    """Reads the matrices NAME.lora_a and NAME.lora_b of weights: B has the rows of its weight, A the columns."""

    def _rule(self, name: str) -> TensorRule:
        weight, _, half = name.rpartition(".")
        place = self.architecture.place(weight)
        assert place is not None  # checked when the file was opened
        rule = TensorRule(place.rule.name)
        if half == "lora_b":
            return replace(rule, row_order=place.rule.row_order)
        return replace(rule, column_order=place.rule.column_order)
