"""Reads and writes the tensors of safetensors files.

Reading copies (`preadv`) and never maps, so a file that shrinks is an error and not a crash; a file that changed after
its header was read is refused. Writing follows a plan, into a folder that appears by one rename.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from mycli.runtime.checkpoint.adapter import Adapter, LowRank
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.safetensors_header import INDEX, SINGLE, TensorEntry, make_header
from mycli.runtime.device.placement import dtype_info, torch_dtype
from mycli.runtime.errors import ModelError
from mycli.runtime.models.part_spec import Shape
from mycli.runtime.utils.atomic_folder import Staging
from mycli.runtime.utils.files import disk_errors

_MERGED_VALUES = 1 << 20  # of an adapter's product at a time: 4 MB of fp32
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
        if bad:
            raise ModelError(f"{name}: {bad} of {tensor.numel()} values are NaN or infinite", code=code)
        return
    # One pass without a copy: the extremes are NaN or infinite if any value is. Counting takes ten times as long.
    low, high = torch.aminmax(tensor)
    if not (math.isfinite(low.item()) and math.isfinite(high.item())):
        bad = tensor.numel() - int(torch.isfinite(tensor).sum())
        raise ModelError(f"{name}: {bad} of {tensor.numel()} values are NaN or infinite", code=code)


class Checkpoint:
    """Reads the tensors of a manifest to the CPU; safe to use from several threads; keeps no file open.

    Raises ModelError for NaN or infinity, unless `allow_nonfinite`, and for a file that changed since the manifest was
    read.
    """

    def __init__(self, manifest: Manifest, *, allow_nonfinite: bool = False) -> None:
        self.manifest = manifest
        self._allow_nonfinite = allow_nonfinite

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
        """Read a tensor into `out`: on the CPU, contiguous (rows of a larger tensor are), of equal dtype and shape."""
        entry = self.entry(name)
        if out.dtype != torch_dtype(entry.dtype) or out.shape != entry.shape or not out.is_contiguous():
            raise ValueError(f"{name} is {entry.dtype} {entry.shape}, not {out.dtype} {tuple(out.shape)}, contiguous")
        stored = torch.empty(out.shape[::-1], dtype=out.dtype) if entry.transposed else out
        if entry.nbytes:
            self.manifest.files[entry.file].read_into(tensor_bytes(stored), entry.offset)
        if entry.transposed:
            out.copy_(stored.T)
        self.check(out, f"{entry.file}: {name}")

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

    def tied_head_differs(self) -> bool:
        """Return whether a model with tied embeddings stores an `lm_head.weight` that differs from the embedding."""
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if head not in self.manifest.tensors:
            return False
        if self.entry(head).nbytes != self.entry(embedding).nbytes:
            return True
        return any(a != b for a, b in zip(self.chunks(head), self.chunks(embedding), strict=True))


class MergedCheckpoint(Checkpoint):
    """Reads `base` with a LoRA adapter merged into its weights; safe to use from several threads.

    Sums are fp32 and rounded once to the stored dtype, as PEFT's `merge_and_unload` computes them.
    """

    def __init__(self, base: Checkpoint, adapter: Adapter, *, allow_nonfinite: bool = False) -> None:
        super().__init__(base.manifest, allow_nonfinite=allow_nonfinite)
        self._base, self._adapter = base, adapter
        self._changes = Checkpoint(adapter.manifest, allow_nonfinite=allow_nonfinite)

    def dtype(self, name: str) -> torch.dtype:
        return self._base.dtype(name)

    def read_into(self, name: str, out: Tensor) -> None:
        """Read a tensor and merge the adapter. Raises ModelError if the sum is not finite, and what reading raises."""
        stored, added = self._adapter.replaced.get(name), self._adapter.added.get(name)
        if stored is not None:
            out.copy_(self._changes.read(stored))
        else:
            self._base.read_into(name, out)
        if added is not None:
            self._add(out, added)
        if stored is not None or added is not None:
            self.check(out, f"{name} with the adapter")

    def chunks(self, name: str) -> Iterator[memoryview]:
        if name in self._adapter.added or name in self._adapter.replaced:
            return iter([tensor_bytes(self.read(name))])
        return self._base.chunks(name)

    def _add(self, weight: Tensor, added: LowRank) -> None:
        a, b = (self._changes.read(name).float() for name in (added.a, added.b))
        rows = max(1, _MERGED_VALUES // weight.shape[1])
        for start in range(0, len(weight), rows):
            part = weight[start : start + rows]
            part.copy_((b[start : start + rows] @ a).mul_(added.scale).add_(part))


def _shards(plan: Sequence[tuple[str, torch.dtype, Shape]], limit: int) -> list[list[tuple[str, str, Shape]]]:
    # In the order of the plan; a tensor larger than the limit has a file of its own.
    shards: list[list[tuple[str, str, Shape]]] = [[]]
    size = 0
    for name, dtype, shape in plan:
        nbytes = math.prod(shape) * dtype.itemsize
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append((name, dtype_info(dtype).safetensors_name, shape))
        size += nbytes
    return shards


def _index(entries: Mapping[str, TensorEntry]) -> bytes:
    files = {name: entries[name].file for name in sorted(entries)}
    total = sum(entry.nbytes for entry in entries.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2).encode() + b"\n"


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


class CheckpointWriter(Staging):
    """Writes a model folder by a plan; a context manager that leaves a whole folder or nothing.

    `plan` gives name, dtype and shape of every tensor, which fixes its place: tensors may be written in any order and
    from any thread, and none is held in memory. Before `finish`, `folder` can be opened as a model to check it. Raises
    ResourceError or UsageError naming the target if the disk fails.
    """

    def __init__(
        self,
        target: Path,
        plan: Sequence[tuple[str, torch.dtype, Shape]],
        *,
        overwrite: bool = False,
        source: Path | None = None,
        max_shard_bytes: int = 5 << 30,
    ) -> None:
        shards = _shards(plan, max_shard_bytes)
        self._headers: dict[str, bytes] = {}
        self._entries: dict[str, TensorEntry] = {}
        for number, shard in enumerate(shards, 1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            self._headers[file], entries = make_header(shard, file)
            self._entries.update(entries)
        if len(self._entries) != len(plan):
            raise ValueError("the plan names a tensor twice")
        self._sizes = {file: len(header) for file, header in self._headers.items()}
        for entry in self._entries.values():
            self._sizes[entry.file] += entry.nbytes
        super().__init__(target, sum(self._sizes.values()), overwrite=overwrite, source=source)
        self._files: dict[str, int] = {}
        self._pending = set(self._entries)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            with disk_errors(self.target):
                for file, header in self._headers.items():
                    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    self._files[file] = os.open(self.folder / file, flags, 0o666)
                    os.truncate(self._files[file], self._sizes[file])
                    _write_all(self._files[file], memoryview(header), 0)
            if len(self._headers) > 1:
                self.add_file(INDEX, _index(self._entries))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        super().__exit__()

    def _close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of any device, in the planned dtype and shape. Raises ModelError for NaN or infinity."""
        entry = self._entries[name]
        if tensor.dtype != torch_dtype(entry.dtype) or tensor.shape != entry.shape:
            raise ValueError(
                f"{name} is planned as {entry.dtype} {entry.shape}, not {tensor.dtype} {tuple(tensor.shape)}"
            )
        check_finite(tensor, name, code="verify-files")
        with disk_errors(self.target):
            _write_all(self._files[entry.file], tensor_bytes(tensor.cpu().contiguous()), entry.offset)
        self._pending.discard(name)

    def copy(self, name: str, checkpoint: Checkpoint, source_name: str | None = None) -> None:
        """Copy the stored bytes of a tensor of `checkpoint`, whose dtype and shape must be the planned ones."""
        entry, origin = self._entries[name], checkpoint.entry(source_name or name)
        if (entry.dtype, entry.shape) != (origin.dtype, origin.shape):
            raise ValueError(f"{name} is planned as {entry.dtype} {entry.shape}, not {origin.dtype} {origin.shape}")
        position = entry.offset
        with disk_errors(self.target):
            for chunk in checkpoint.chunks(origin.name):
                _write_all(self._files[entry.file], chunk, position)
                position += len(chunk)
        self._pending.discard(name)

    def add_file(self, name: str, data: bytes) -> None:
        if Path(name).name != name or name in ("", "..", *self._headers):
            raise ValueError(f"{name!r} is not a name for another file")
        with disk_errors(self.target):
            (self.folder / name).write_bytes(data)

    def finish(self) -> None:
        """Flush everything and rename the folder to its target. All tensors must have been written."""
        if self._pending:
            raise ValueError(f"{len(self._pending)} tensors not written, {min(self._pending)} among them")
        Manifest.open(self.folder)  # the written files must pass our own reader before they appear
        self._close()
        self.commit()
