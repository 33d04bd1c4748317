"""Writes the tensors of a model by a plan, into a folder of safetensors files that appears by one rename."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.reader import Checkpoint, check_finite, tensor_bytes
from mycli.runtime.checkpoint.safetensors_header import INDEX, SINGLE, TensorEntry, make_header
from mycli.runtime.checkpoint.sentence_transformers import MODULE_FILE
from mycli.runtime.device.placement import dtype_info, torch_dtype
from mycli.runtime.models.part_spec import Shape
from mycli.runtime.tokenizer.chat_template import TEMPLATE_FILE
from mycli.runtime.utils.atomic_folder import Staging
from mycli.runtime.utils.files import disk_errors

_COPIED_AT_ONCE = 16 << 20  # bytes


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
        stored_name: Callable[[str], str] = lambda name: name,
        resumable: Path | None = None,
    ) -> None:
        """stored_name: returns the name of a planned tensor in the files."""
        self._max_shard_bytes, self._stored_name = max_shard_bytes, stored_name
        self._lay_out(plan)
        super().__init__(target, sum(self._sizes.values()), overwrite=overwrite, source=source, resumable=resumable)
        self.continues = False  # with `resumable`: the files of an unfinished run with the same plan are there
        self._files: dict[str, int] = {}

    def _lay_out(self, plan: Sequence[tuple[str, torch.dtype, Shape]]) -> None:
        shards = _shards(plan, self._max_shard_bytes)
        self._headers: dict[str, bytes] = {}
        self._entries: dict[str, TensorEntry] = {}  # by the names of the plan ...
        self._stored: dict[str, TensorEntry] = {}  # ... and by those in the files
        for number, shard in enumerate(shards, 1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            stored = [(self._stored_name(name), dtype, shape) for name, dtype, shape in shard]
            self._headers[file], entries = make_header(stored, file)
            self._stored.update(entries)
            self._entries.update({name: entries[self._stored_name(name)] for name, _, _ in shard})
        if len(self._entries) != len(plan):
            raise ValueError("the plan names a tensor twice")
        self._sizes = {file: len(header) for file, header in self._headers.items()}
        for entry in self._entries.values():
            self._sizes[entry.file] += entry.nbytes
        self._pending = set(self._entries)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            with disk_errors(self.target):
                self.continues = self._resumable and all(map(self._is_begun, self._headers))
                if self.continues:
                    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
                    self._files = {file: os.open(self.folder / file, flags) for file in self._headers}
                else:
                    self._create_files()
            if len(self._headers) > 1:
                self.add_file(INDEX, _index(self._stored))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _create_files(self) -> None:
        for file, header in self._headers.items():
            (self.folder / file).unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._files[file] = os.open(self.folder / file, flags, 0o666)
            os.truncate(self._files[file], self._sizes[file])
            _write_all(self._files[file], memoryview(header), 0)

    def replan(self, plan: Sequence[tuple[str, torch.dtype, Shape]]) -> None:
        """Write the files anew by another plan: tensors in both are copied, the others are to be written."""
        # The disk holds both until the old files, whose names are removed first, are closed.
        entries, files, written = self._entries, self._files, set(self._entries) - self._pending
        with disk_errors(self.target):
            for file in (*files, INDEX):
                (self.folder / file).unlink(missing_ok=True)
            self._files = {}
            try:
                self._lay_out(plan)
                self._create_files()
                for name in written & set(self._entries):
                    self._copy_bytes(files[entries[name].file], entries[name], name)
            finally:
                for descriptor in files.values():
                    os.close(descriptor)
        if len(self._headers) > 1:
            self.add_file(INDEX, _index(self._stored))

    def _copy_bytes(self, descriptor: int, origin: TensorEntry, name: str) -> None:
        entry, done = self._entries[name], 0
        if (entry.dtype, entry.shape) != (origin.dtype, origin.shape):
            return
        while done < entry.nbytes:
            chunk = os.pread(descriptor, min(_COPIED_AT_ONCE, entry.nbytes - done), origin.offset + done)
            _write_all(self._files[entry.file], memoryview(chunk), entry.offset + done)
            done += len(chunk)
        self._pending.discard(name)

    def _is_begun(self, file: str) -> bool:
        path, header = self.folder / file, self._headers[file]
        if path.is_symlink() or not path.is_file() or path.stat().st_size != self._sizes[file]:
            return False
        with path.open("rb") as stream:
            return stream.read(len(header)) == header

    def mark_written(self, name: str) -> None:
        """Mark a tensor, or the parts of the packed weight of the linear `name`, as written by an earlier run."""
        self._pending -= {tensor for tensor in self._pending if tensor == name or tensor.startswith(f"{name}.weight")}

    def flush(self) -> None:
        with disk_errors(self.target):
            for descriptor in self._files.values():
                os.fsync(descriptor)

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

    def copy(self, name: str, checkpoint: Checkpoint) -> None:
        """Copy the stored bytes of a tensor of `checkpoint`, whose dtype and shape must be the planned ones."""
        entry, origin = self._entries[name], checkpoint.entry(name)
        if (entry.dtype, entry.shape) != (origin.dtype, origin.shape):
            raise ValueError(f"{name} is planned as {entry.dtype} {entry.shape}, not {origin.dtype} {origin.shape}")
        position = entry.offset
        with disk_errors(self.target):
            for chunk in checkpoint.chunks(origin.name):
                _write_all(self._files[entry.file], chunk, position)
                position += len(chunk)
        self._pending.discard(name)

    def add_file(self, name: str, data: bytes) -> None:
        plain = Path(name).name == name and name not in ("", "..", *self._headers)
        if not plain and not MODULE_FILE.fullmatch(name) and not TEMPLATE_FILE.fullmatch(name):
            raise ValueError(f"{name!r} is not a name for another file")
        path = self.folder / name
        with disk_errors(self.target):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)

    def finish(self) -> None:
        """Flush everything and rename the folder to its target. All tensors must have been written."""
        if self._pending:
            raise ValueError(f"{len(self._pending)} tensors not written, {min(self._pending)} among them")
        Manifest.open(self.folder)  # the written files must pass our own reader before they appear
        self._close()
        self.commit()
