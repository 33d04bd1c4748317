"""Writes a GGUF file, version 3, by a plan: first the header, then the tensors in any order.

The file appears by one rename, when all of it is on the disk.
"""

import math
import os
import struct
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mycli.runtime.checkpoint.gguf.header import ALIGNMENT, MAGIC, parse_gguf_header
from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME
from mycli.runtime.checkpoint.safetensors_header import TensorEntry
from mycli.runtime.checkpoint.stable_file import RegularFile
from mycli.runtime.errors import UsageError
from mycli.runtime.models.part_spec import Shape
from mycli.runtime.utils.files import LockedError, disk_errors, flush, locked, require_space

_VERSION = 3


@dataclass(frozen=True)
class Unwritten:
    """A metadata array of F32 values that are written later, like those of a tensor."""

    count: int


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    kind, data = _typed(value)
    return struct.pack("<I", kind) + data


def _typed(value: Any) -> tuple[int, bytes]:
    # Type ids of the specification, in the widths that llama.cpp's converter uses: 32 bits for numbers.
    if isinstance(value, bool):
        return 7, struct.pack("<B", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _text(value)
    if isinstance(value, Unwritten):
        return 9, struct.pack("<IQ", 6, value.count) + bytes(4 * value.count)
    if all(isinstance(item, str) for item in value):
        return 9, struct.pack("<IQ", 8, len(value)) + b"".join(map(_text, value))
    if all(isinstance(item, bool) for item in value):
        return 9, struct.pack(f"<IQ{len(value)}B", 7, len(value), *value)
    if all(type(item) is int for item in value):
        return 9, struct.pack(f"<IQ{len(value)}i", 5, len(value), *value)
    return 9, struct.pack(f"<IQ{len(value)}f", 6, len(value), *value)


def make_gguf_header(
    metadata: Mapping[str, Any], tensors: Sequence[tuple[str, str, Shape]], file: str
) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return the header of a file of `tensors` (name, ggml type, shape), padded, and the place of each tensor.

    An `Unwritten` array has a place as well, by its key.
    """
    arrays: dict[str, TensorEntry] = {}
    data = bytearray(MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        data += _text(key) + _value(value)
        if isinstance(value, Unwritten):
            nbytes = 4 * value.count
            arrays[key] = TensorEntry(key, "F32", (value.count,), file, len(data) - nbytes, nbytes)
    places: list[tuple[str, str, Shape, int, int]] = []
    position = 0
    for name, kind, shape in tensors:
        block = TYPES_BY_NAME[kind]
        nbytes = math.prod(shape) // block.block * block.nbytes
        data += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), block.id, position)
        places.append((name, kind, shape, position, nbytes))
        position += -(-nbytes // ALIGNMENT) * ALIGNMENT
    data += bytes(-len(data) % ALIGNMENT)
    entries = {
        name: TensorEntry(name, kind, shape, file, len(data) + start, nbytes)
        for name, kind, shape, start, nbytes in places
    }
    return bytes(data), arrays | entries


class GgufWriter:
    """Writes the file `target` by a plan; a context manager that leaves a whole file after `finish`, else nothing.

    Raises UsageError for a target that cannot be written, exists (unless `overwrite`) or is being written by another
    process; ResourceError for too little space.
    """

    def __init__(
        self,
        target: Path,
        metadata: Mapping[str, Any],
        tensors: Sequence[tuple[str, str, Shape]],
        *,
        overwrite: bool = False,
    ) -> None:
        self.target = Path(os.path.abspath(os.path.expanduser(target)))
        self._overwrite = overwrite
        self._header, self.entries = make_gguf_header(metadata, tensors, self.target.name)
        last = max((entry.offset + entry.nbytes for entry in self.entries.values()), default=len(self._header))
        self.nbytes = -(-last // ALIGNMENT) * ALIGNMENT
        self._partial = self.target.with_name(f".{self.target.name[:100]}.{uuid.uuid4().hex[:12]}.partial")
        self._lock = locked(self.target.with_name(f".{self.target.name[:100]}.lock"), remove=True)
        self._file = -1
        self._pending = set(self.entries)

    def __enter__(self) -> Self:
        self._check_target()
        with disk_errors(self.target):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            require_space(self.target.parent, self.nbytes)
            try:
                self._lock.__enter__()
            except LockedError as lock:
                message = f"{self.target}: process {lock.holder} is writing it"
                raise UsageError(message, "wait for it, or choose another name") from None
            try:
                self._clean()
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._file = os.open(self._partial, flags, 0o666)
                os.truncate(self._file, self.nbytes)
                self._put(memoryview(self._header), 0)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        with suppress(OSError):
            self._partial.unlink(missing_ok=True)
        self._lock.__exit__(None, None, None)

    def _check_target(self) -> None:
        if os.path.lexists(self.target):
            if not self._overwrite:
                raise UsageError(f"{self.target}: exists already", code="target-exists")
            if self.target.is_symlink() or not self.target.is_file():
                raise UsageError(f"{self.target}: not a regular file, so it is not replaced", "choose another name")

    def _clean(self) -> None:
        # Partial files of a killed run: no other process writes here while this one holds the lock.
        prefix = f".{self.target.name[:100]}."
        for path in self.target.parent.iterdir():
            if path.name.startswith(prefix) and path.name.endswith(".partial"):
                path.unlink()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _put(self, view: memoryview, offset: int) -> None:
        while view:
            count = os.pwrite(self._file, view, offset)
            view, offset = view[count:], offset + count

    def write(self, name: str, data: memoryview, start: int = 0) -> None:
        """Write bytes of a tensor from `start`; the write that reaches its end completes it."""
        entry = self.entries[name]
        if start + data.nbytes > entry.nbytes:
            raise ValueError(f"{name} has {entry.nbytes} bytes, not {start + data.nbytes}")
        with disk_errors(self.target):
            self._put(data.cast("B"), entry.offset + start)
        if start + data.nbytes == entry.nbytes:
            self._pending.discard(name)

    def leave_zero(self, name: str) -> None:
        """Complete a tensor of zeros: the file has them already."""
        self._pending.discard(name)

    @property
    def partial(self) -> Path:
        """The file while it is being written."""
        return self._partial

    def finish(self) -> None:
        """Flush everything and rename the file to its target. All tensors must have been written."""
        if self._pending:
            raise ValueError(f"{len(self._pending)} tensors not written, {min(self._pending)} among them")
        written = RegularFile.find(self._partial)
        # The written header must pass our own reader before the file appears.
        parse_gguf_header(lambda offset, count: written.read(count, offset), written.size, self.target.name)
        with disk_errors(self.target):
            os.fsync(self._file)
            self._close()
            self._check_target()
            os.replace(self._partial, self.target)
            flush(self.target.parent)
