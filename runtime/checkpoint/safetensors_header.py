"""Parses and writes the header of a safetensors file; the bytes may come from a disk or a range request.

Follows the safetensors README (8 bytes of little-endian length, a JSON object, then the data), and refuses what its
library accepts: duplicate names, unknown fields, control characters, headers beyond `MAX_HEADER`. Imports no torch.
"""

import json
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mycli.runtime.errors import ModelError
from mycli.runtime.utils.dtypes import BY_SAFETENSORS_NAME
from mycli.runtime.utils.json_fields import parse_object
from mycli.runtime.utils.sanitize import one_line

# Bytes, and values in them: packed experts take 130 and 5 per tensor, the largest models have 300,000 tensors. Parsing
# takes at most 300 bytes of memory per value of a hostile file; the library's limit of 100 MB allows gigabytes.
MAX_HEADER = 32 << 20
MAX_VALUES = 1_400_000
MAX_NAME = 1024
MAX_METADATA = 1 << 20
MAX_DIMENSIONS = 8
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LIMIT = 1 << 63
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}

# Compared only if length and brace cannot be a header's: a header of 640 bytes starts like a pickle.
_NO_PICKLES = "pickles can run code and are never opened; use safetensors"
_MAGIC = (
    (b"GGUF", "a GGUF file", "use a repository that holds safetensors files"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes", _NO_PICKLES),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (b"version https://git-lfs", "a git-lfs pointer, not the file it stands for", "run: git lfs pull"),
    (b"<", "an HTML or XML page, perhaps an error message", ""),
    (b"{", "a JSON text, perhaps an error message", ""),
    (b"\x80\x02", "a Python pickle", _NO_PICKLES),
    (b"\x80\x04", "a Python pickle", _NO_PICKLES),
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: `offset` in bytes from the start of `file`, `dtype` a key of `utils.dtypes.BY_SAFETENSORS_NAME`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    transposed: bool = False  # the file holds the transpose of a matrix of `shape`
    columns: tuple[int, int] | None = None  # of that transpose: the first column, and those of the whole stored matrix
    added: float = 0.0  # that each value in the file has more than the tensor's
    divided: Literal["columns", "rows"] | None = None  # each one in the file is to be divided by its norm
    parts: tuple["TensorEntry", ...] = ()  # the stored tensors that this one is computed from

    def split(
        self, names: Sequence[str], *, transposed: bool = False, part: tuple[int, ...] | None = None
    ) -> list["TensorEntry"]:
        """Split a tensor [a, b, ...] into n = len(names) tensors [a * b / n, ...] that lie one after the other.

        transposed: [n, a, b] into n of [b, a]. part: the expected shape [r, c] of a tensor; [e, c, r * n / e] is then
        split into transposes too. Returns the tensor itself if it has another shape.
        """
        rows = math.prod(self.shape[:2])
        if part is not None and not transposed and self._stacks_transposes(len(names), part):
            return self._split_columns(names, part)
        if len(self.shape) < 2 or rows % len(names) or (transposed and self.shape[0] != len(names)):
            return [self]
        shape, size = (rows // len(names), *self.shape[2:]), self.nbytes // len(names)
        shape = shape[::-1] if transposed else shape
        return [
            TensorEntry(name, self.dtype, shape, self.file, self.offset + index * size, size, transposed)
            for index, name in enumerate(names)
        ]

    def _stacks_transposes(self, count: int, part: tuple[int, ...]) -> bool:
        if len(self.shape) != 3 or len(part) != 2 or not self.shape[0] or count % self.shape[0]:
            return False
        stacked = (part[0] * (count // self.shape[0]), part[1])
        return self.shape[1:] == stacked[::-1] != stacked

    def _split_columns(self, names: Sequence[str], part: tuple[int, ...]) -> list["TensorEntry"]:
        stacks, _, width = self.shape
        parts, size = len(names) // stacks, self.nbytes // stacks
        return [
            TensorEntry(
                name,
                self.dtype,
                part,
                self.file,
                self.offset + index // parts * size,
                size // parts,
                transposed=True,
                columns=(index % parts * part[0], width),
            )
            for index, name in enumerate(names)
        ]


def index_counts(shards: Iterable[str], present: Container[str]) -> bool:
    """Return whether an index of `shards` describes a folder that holds the files `present`.

    As in transformers, a single file counts instead of an index whose shards are all gone.
    """
    return SINGLE not in present or any(name in present for name in shards)


def damaged(problem: str) -> ModelError:
    return ModelError(problem, code="pull-again")


def _not_safetensors(prefix: bytes, problem: str, source: str) -> ModelError:
    plausible = int.from_bytes(prefix[:8], "little") <= MAX_HEADER and prefix[8:9] == b"{"
    for magic, meaning, hint in _MAGIC:
        if not plausible and prefix.lstrip().startswith(magic):
            return ModelError(
                f"{source}: not a safetensors file but {meaning}", hint, code="" if hint else "pull-again"
            )
    return damaged(f"{source}: {problem}")


def header_bytes(prefix: bytes, file_bytes: int, source: str) -> int:
    """Return the bytes of length field and header together; `prefix` is the first 9 bytes or more of the file.

    Raises ModelError naming `source` and, for another kind of file, its kind.
    """
    length = int.from_bytes(prefix[:8], "little")
    if file_bytes < 10:
        raise _not_safetensors(
            prefix, "empty file, not safetensors" if not file_bytes else f"truncated to {file_bytes} bytes", source
        )
    if length > MAX_HEADER:
        raise _not_safetensors(prefix, f"header of {length} bytes, more than the {MAX_HEADER} allowed", source)
    if length > file_bytes - 8:
        raise _not_safetensors(prefix, f"truncated: header of {length} bytes in a file of {file_bytes}", source)
    if prefix[8:9] != b"{":
        raise _not_safetensors(prefix, "not a safetensors file: the header is not a JSON object", source)
    return 8 + length


def _naturals(values: Any) -> bool:
    # `type is int`: true is an int to isinstance.
    return isinstance(values, list) and all(type(value) is int and 0 <= value < _LIMIT for value in values)


def _check_metadata(metadata: Any, source: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(f"{source}: {_METADATA} must map strings to strings")
    size = sum(len(key) + len(value) for key, value in metadata.items())
    if size > MAX_METADATA:
        raise damaged(f"{source}: {_METADATA} of {size} characters, more than the {MAX_METADATA} allowed")


def _entry(name: str, info: Any, start: int, source: str) -> TensorEntry:
    if not name or one_line(name, MAX_NAME) != name or "../" in name or "..\\" in name:
        raise damaged(f"{source}: tensor name {name!r:.80} is empty, too long or holds forbidden characters")
    if not isinstance(info, dict) or info.keys() != _FIELDS:
        raise damaged(f"{source}: {name:.80} must have exactly {', '.join(sorted(_FIELDS))}")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BY_SAFETENSORS_NAME:
        hint = f"readable: {', '.join(BY_SAFETENSORS_NAME)}"
        raise ModelError(f"{source}: {name:.80} has dtype {dtype!r:.40}, which is not supported", hint)
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise damaged(f"{source}: {name:.80} has no valid shape: {shape!r:.80}")
    if not _naturals(offsets) or len(offsets) != 2:
        raise damaged(f"{source}: {name:.80} has no valid data_offsets: {offsets!r:.80}")
    begin, end = offsets
    nbytes = math.prod(shape) * BY_SAFETENSORS_NAME[dtype].nbytes
    if nbytes >= _LIMIT:
        raise damaged(f"{source}: {name:.80} of shape {shape} overflows 64 bits")
    if end - begin != nbytes:
        raise damaged(f"{source}: {name:.80} {dtype} {shape} takes {nbytes} bytes, but its offsets hold {end - begin}")
    return TensorEntry(name, dtype, tuple(shape), source, start + begin, nbytes)


def _check_coverage(entries: Iterable[TensorEntry], start: int, file_bytes: int, source: str) -> None:
    # Every byte of the data must belong to exactly one tensor: nothing can hide, nothing is shared.
    position = start
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset < position:
            raise damaged(f"{source}: {entry.name:.80} overlaps the tensor before it")
        if entry.offset > position:
            raise damaged(f"{source}: {entry.offset - position} unused bytes before {entry.name:.80}")
        position += entry.nbytes
    if position > file_bytes:
        raise damaged(f"{source}: truncated: {position} bytes expected, the file has {file_bytes}")
    if position < file_bytes:
        raise damaged(f"{source}: {file_bytes - position} unused bytes after the last tensor")


def parse_header(prefix: bytes, file_bytes: int, source: str) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name, from at least its first `header_bytes` bytes.

    `source` becomes `TensorEntry.file` and the name in errors. Raises ModelError naming the file and the tensor for
    anything that the format forbids or leaves open; ValueError if `prefix` is shorter than the header.
    """
    start = header_bytes(prefix, file_bytes, source)
    if len(prefix) < start:
        raise ValueError(f"{start} bytes of {source} needed, got {len(prefix)}")
    header = prefix[8:start]
    if header.count(b",") > MAX_VALUES:  # before parsing, which takes the memory
        raise damaged(f"{source}: the header has more than the {MAX_VALUES} values allowed")
    values = dict(parse_object(header, source, MAX_HEADER).values)
    _check_metadata(values.pop(_METADATA, {}), source)
    entries = {name: _entry(name, info, start, source) for name, info in values.items()}
    _check_coverage(entries.values(), start, file_bytes, source)
    return entries


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], file: str) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return length field and header of a file of `tensors` (name, dtype, shape), and the place of each tensor."""
    info: dict[str, Any] = {_METADATA: {"format": "pt"}}
    entries, position = [], 0
    # Wide dtypes first: every tensor is aligned to its items, which libraries that map the file need.
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -BY_SAFETENSORS_NAME[tensor[1]].nbytes):
        nbytes = math.prod(shape) * BY_SAFETENSORS_NAME[dtype].nbytes
        info[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        entries.append(TensorEntry(name, dtype, shape, file, position, nbytes))
        position += nbytes
    text = json.dumps(info, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {entry.name: replace(entry, offset=len(header) + entry.offset) for entry in entries}
