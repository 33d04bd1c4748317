"""Reads the tensors of safetensors files.

Copies (`preadv`) and never maps, so a file that shrinks is an error and not a crash; a file that changed after its
header was read is refused.
"""

import math
from collections.abc import Collection, Iterator
from threading import Event
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.safetensors_header import TensorEntry
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.errors import ModelError
from mycli.runtime.quantization.low_rank import LowRankUpdate

if TYPE_CHECKING:  # only a model with an adapter needs it
    from mycli.runtime.checkpoint.adapter import Adapter, LowRank

_MERGED_VALUES = 1 << 20  # of an adapter's product at a time: 4 MB of fp32
_CONVERTED_VALUES = 1 << 20  # at a time: 4 MB of fp32
# 8-bit floats, for which torch has no aminmax: mask of the bits without sign, and the largest finite value in them.
_FLOAT8_LIMITS = {
    torch.float8_e4m3fn: (0x7F, 0x7E),
    torch.float8_e5m2: (0x7F, 0x7B),
    torch.float8_e8m0fnu: (0xFF, 0xFE),
}


def tensor_bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def check_finite(tensor: Tensor, name: str, code: str) -> None:
    """Raise ModelError with the count, and `code`, if a floating-point tensor holds NaN or infinity."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    if tensor.dtype in _FLOAT8_LIMITS:
        mask, largest = _FLOAT8_LIMITS[tensor.dtype]
        bad = int(((tensor.view(torch.uint8) & mask) > largest).sum())
    else:
        # One pass without a copy: the extremes are NaN or infinite if any value is. Counting takes ten times as long.
        finite = all(math.isfinite(extreme.item()) for extreme in torch.aminmax(tensor))
        bad = 0 if finite else tensor.numel() - int(torch.isfinite(tensor).sum())
    if bad:
        raise ModelError(f"{name}: {bad} of {tensor.numel()} values are NaN or infinite", code=code)


class Checkpoint:
    """Reads the tensors of a manifest to the CPU; safe to use from several threads; keeps no file open.

    Raises ModelError for NaN or infinity, unless `allow_nonfinite`, and for a file that changed since the manifest was
    read.
    """

    def __init__(self, manifest: Manifest, *, allow_nonfinite: bool = False, cancelled: Event | None = None) -> None:
        self.manifest = manifest
        self._allow_nonfinite = allow_nonfinite
        self._cancelled = cancelled or Event()

    def cancel(self) -> None:
        """Make reads on other threads raise CancelledError soon, and later ones without reading."""
        self._cancelled.set()

    def entry(self, name: str) -> TensorEntry:
        """Return shape and place of a tensor. Raises ModelError for an unknown name."""
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise ModelError(f"{self.manifest.folder}: no tensor {name:.80}", "the folder does not hold a whole model")
        return entry

    def dtype(self, name: str) -> torch.dtype:
        return torch_dtype(self.entry(name).dtype)

    def prefetch(self, name: str) -> None:
        entry = self.manifest.tensors.get(name)
        if entry is not None:
            self.manifest.files[entry.file].prefetch(entry.offset, entry.nbytes)

    def read(self, name: str) -> Tensor:
        out = torch.empty(self.entry(name).shape, dtype=self.dtype(name))
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor into `out`: on the CPU, contiguous (rows of a larger tensor are), of equal shape.

        Floats are converted to another float dtype a part at a time: a head of fp32 takes a gigabyte. Raises ModelError
        for values that are not finite, or too large for `out`.
        """
        entry = self.entry(name)
        stored, place = torch_dtype(entry.dtype), f"{entry.file}: {name}"
        convertible = stored == out.dtype or (stored.is_floating_point and out.is_floating_point())
        if not convertible or out.shape != entry.shape or not out.is_contiguous():
            raise ValueError(f"{name} is {entry.dtype} {entry.shape}, not {out.dtype} {tuple(out.shape)}, contiguous")
        if entry.transposed:
            self._read_transposed(entry, out)
        elif out.dtype == stored:
            self._read_bytes(entry, out, entry.offset)
        else:
            self._read_converted(entry, out.view(-1))
            place += ", in float16" if out.dtype == torch.float16 else ""  # whose range is smaller than the others'
        self.check(out, place)

    def _convert(self, name: str, out: Tensor) -> None:
        # Reads a tensor that is computed in its stored dtype into `out` of another one.
        out.copy_(self.read(name))
        self.check(out, name)

    def _read_bytes(self, entry: TensorEntry, out: Tensor, offset: int) -> None:
        if out.numel():
            self.manifest.files[entry.file].read_into(tensor_bytes(out), offset, self._cancelled)

    def _read_converted(self, entry: TensorEntry, out: Tensor) -> None:
        part = torch.empty(min(_CONVERTED_VALUES, len(out)), dtype=torch_dtype(entry.dtype))
        for start in range(0, len(out), _CONVERTED_VALUES):
            values = part[: len(out) - start]
            self._read_bytes(entry, values, entry.offset + start * part.itemsize)
            out[start : start + len(values)] = values

    def _read_transposed(self, entry: TensorEntry, out: Tensor) -> None:
        # A part of the columns is read with the others, which takes fewer calls than every row on its own.
        rows, columns = out.shape[1], out.shape[0]
        first, whole = (0, columns) if entry.columns is None else entry.columns
        stored = torch.empty(rows, whole, dtype=torch_dtype(entry.dtype))
        self._read_bytes(entry, stored, entry.offset)
        out.copy_(stored[:, first : first + columns].T)

    @property
    def stored(self) -> "Checkpoint":
        """The tensors as the files have them, without an adapter."""
        return self

    def update(self, name: str) -> LowRankUpdate | None:
        """Return the update of an adapter that is not merged when the weight `name` is read; None if it has none."""
        return None

    def check(self, tensor: Tensor, name: str) -> None:
        """Raise ModelError if a tensor computed from stored ones holds NaN or infinity, unless these are allowed."""
        if not self._allow_nonfinite:
            check_finite(tensor, name, code="allow-nonfinite")

    def chunks(self, name: str) -> Iterator[memoryview]:
        """Yield the stored bytes of a tensor in pieces, each valid until the next."""
        entry = self.entry(name)
        if entry.transposed:
            return iter([tensor_bytes(self.read(name))])
        return self.manifest.files[entry.file].chunks(entry.offset, entry.nbytes)


class MergedCheckpoint(Checkpoint):
    """Reads `base` with a LoRA adapter merged into its dense weights; safe to use from several threads.

    Sums are fp32 and rounded once to the stored dtype, as PEFT's `merge_and_unload` computes them. `changes` reads the
    adapter's tensors. Weights in `packed` are not changed: see `update`.
    """

    def __init__(
        self,
        base: Checkpoint,
        adapter: "Adapter",
        changes: Checkpoint,
        packed: Collection[str],
        *,
        allow_nonfinite: bool = False,
    ) -> None:
        super().__init__(base.manifest, allow_nonfinite=allow_nonfinite)
        self._base, self._adapter, self._changes, self._packed = base, adapter, changes, packed

    def cancel(self) -> None:
        self._base.cancel()
        self._changes.cancel()

    @property
    def stored(self) -> Checkpoint:
        return self._base

    def dtype(self, name: str) -> torch.dtype:
        return self._base.dtype(name)

    def update(self, name: str) -> LowRankUpdate | None:
        added = self._adapter.added.get(name)
        return None if added is None or name not in self._packed else self._read_update(added)

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor and merge the adapter. Raises ModelError if the sum is not finite, and what reading raises."""
        if out.dtype != self.dtype(name) and (name in self._adapter.replaced or name in self._adapter.added):
            self._convert(name, out)
            return
        stored, added = self._adapter.replaced.get(name), self._adapter.added.get(name)
        if stored is not None:
            out.copy_(self._changes.read(stored))
        else:
            self._base.read_into(name, out)
        if added is not None and name not in self._packed:
            merge_update(self._read_update(added), out)
        if stored is not None or added is not None:
            self.check(out, f"{name} with the adapter")

    def chunks(self, name: str) -> Iterator[memoryview]:
        if name in self._adapter.added or name in self._adapter.replaced:
            return iter([tensor_bytes(self.read(name))])
        return self._base.chunks(name)

    def _read_update(self, added: "LowRank") -> LowRankUpdate:
        a, b = (self._changes.read(name).float() for name in (added.a, added.b))
        norms = None if added.magnitude is None else self._changes.read(added.magnitude).float()
        return LowRankUpdate(a, b, added.scale, norms)


def merge_update(update: LowRankUpdate, weight: Tensor) -> None:
    """Apply an update to a dense weight in place, some rows at a time."""
    step = max(1, _MERGED_VALUES // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        weight[rows] = update.part(rows).apply(weight[rows]).to(weight.dtype)
