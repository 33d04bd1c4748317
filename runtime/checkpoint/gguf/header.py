"""Parses the header of a GGUF file; the bytes may come from a disk or from range requests.

Follows the specification (versions 2 and 3, little-endian) in ggml's docs/gguf.md. Every count, length and offset is
compared with the rest of the file before memory is allocated for it. Duplicate keys and names, arrays of arrays and
gaps between tensors, which the format leaves open, are refused. Imports no torch.
"""

import math
import struct
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mycli.runtime.checkpoint.gguf.types import BY_ID, REMOVED, GgmlType
from mycli.runtime.checkpoint.safetensors_header import TensorEntry, damaged
from mycli.runtime.errors import ModelError
from mycli.runtime.utils.json_fields import Fields
from mycli.runtime.utils.sanitize import one_line

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # default of `general.alignment`
_MAX_HEADER = 256 << 20  # bytes; a vocabulary of 262,144 tokens with merges takes 20 MB
_MAX_TENSORS = 100_000  # the experts of a layer are one tensor
_MAX_KEYS = 1 << 16
_MAX_STRING = 8 << 20
_MAX_ELEMENTS = 1 << 21  # of all arrays; tokens, scores, types and merges of a vocabulary of 262,144 are 1.3 million
_MAX_NAME = 256
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 16
_LIMIT = 1 << 63
_READ = 1 << 20  # bytes per read

Reader = Callable[[int, int], bytes]  # (offset, count): the bytes there, fewer only at the end of the file

# Value types: how struct and array spell the numbers, by the ids of the specification.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of one file.

    An array is a list of strings or booleans, or an `array.array` of numbers. `TensorEntry.dtype` is the name of a ggml
    type, `shape` has the rows first, `offset` counts from the start of the file.
    """

    metadata: Fields
    tensors: Mapping[str, TensorEntry]
    arrays: Mapping[str, TensorEntry] = field(default_factory=dict)  # where arrays of F32 lie, by key


@dataclass(frozen=True)
class GgufModel:
    """The header of a whole model as an architecture reads it; `floats` reads a small F32 tensor.

    `integer`, `number`, `text` and `has` take a key without the architecture's name in front.
    """

    metadata: Fields
    tensors: Mapping[str, TensorEntry]
    floats: Callable[[str], Sequence[float]]
    arrays: Mapping[str, TensorEntry] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return self.metadata.text("general.architecture")

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def integer(self, name: str, default: int | None = None, low: int = 0, high: int = 1 << 31) -> int:
        """Read an integer; of an array with one value for each layer, the value that all layers must share."""
        key = self.key(name)
        value = self.metadata.values.get(key)
        if value is None or isinstance(value, int | float | str):
            return self.metadata.integer(key, default, low, high)
        distinct = set(value)
        if len(distinct) != 1:
            raise self.metadata.fail(key, "differs from layer to layer, which is not supported")
        return Fields({key: distinct.pop()}, self.metadata.source).integer(key, default, low, high)

    def layer_values(self, name: str, layers: int | None = None) -> list[int]:
        """Read an array of small integers or booleans, one for each layer (`layers` or more); a number is an array."""
        key = self.key(name)
        value = self.metadata.values.get(key)
        values = [value] if isinstance(value, int) else list(value) if isinstance(value, list | array) else []
        if (
            not values
            or len(values) < (layers or 1)
            or not all(isinstance(v, int) and 0 <= v < 1 << 31 for v in values)
        ):
            raise self.metadata.fail(key, "is not a list with one whole number for each layer")
        return values[:layers]

    def boolean(self, name: str, default: bool = False) -> bool:
        return self.metadata.boolean(self.key(name), default)

    def number(self, name: str, default: float | None = None, low: float = -1e12) -> float:
        return self.metadata.number(self.key(name), default, low)

    def text(self, name: str, default: str) -> str:
        return self.metadata.text(self.key(name), default)

    def has(self, name: str) -> bool:
        return self.metadata.has(self.key(name))


class _Cursor:
    def __init__(self, read: Reader, size: int, source: str) -> None:
        self._read, self._size, self.source = read, size, source
        self._data = bytearray()
        self._elements = 0
        self.position = 0
        self.arrays: dict[str, TensorEntry] = {}

    def fail(self, problem: str) -> ModelError:
        return damaged(f"{self.source}: {problem} (at byte {self.position})")

    def need(self, count: int, what: str) -> None:
        # The length is checked before any byte is read: a false one allocates nothing.
        end = self.position + count
        if end > self._size:
            raise self.fail(f"truncated: {what} of {count} bytes, but {self._size - self.position} are left")
        if end > _MAX_HEADER:
            raise self.fail(f"header of more than {_MAX_HEADER} bytes")
        while len(self._data) < end:
            start = len(self._data)
            more = self._read(start, min(max(_READ, end - start), self._size - start))
            if not more:
                raise self.fail(f"truncated while {what} was read")
            self._data += more

    def prefix(self, count: int) -> bytes:
        """Return the first `count` bytes, or all of a shorter file."""
        self.need(min(count, self._size), "the magic")
        return bytes(self._data[:count])

    def count_elements(self, count: int, key: str) -> None:
        # Every element becomes a Python object, so the sum counts: an array as long as allowed may occur in any key.
        self._elements += count
        if self._elements > _MAX_ELEMENTS:
            raise self.fail(f"{key} has {count} elements; all arrays have more than the {_MAX_ELEMENTS} allowed")

    def number(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size, what)
        (value,) = struct.unpack_from("<" + code, self._data, self.position)
        self.position += size
        return value

    def text(self, what: str, limit: int) -> str:
        length = self.number("Q", f"the length of {what}")
        if length > limit:
            raise self.fail(f"{what} of {length} bytes, more than the {limit} allowed")
        self.need(length, what)
        data = self._data[self.position : self.position + length]
        try:
            value = data.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None
        self.position += length
        return value

    def boolean(self, what: str) -> bool:
        value = self.number("B", what)
        if value > 1:
            raise self.fail(f"{what} is a boolean of value {value}")
        return bool(value)

    def numbers(self, code: str, count: int, what: str) -> "array[Any]":
        values = array(code)
        self.need(count * values.itemsize, what)
        values.frombytes(bytes(self._data[self.position : self.position + count * values.itemsize]))
        self.position += count * values.itemsize
        if sys.byteorder == "big":
            values.byteswap()
        return values


def _value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.number("I", f"the type of {key}")
    if kind in _NUMBERS:
        return cursor.number(_NUMBERS[kind], key)
    if kind == _BOOL:
        return cursor.boolean(key)
    if kind == _STRING:
        return cursor.text(key, _MAX_STRING)
    if kind == _ARRAY:
        return _array(cursor, key)
    raise cursor.fail(f"{key} has a value of the unknown type {kind}")


def _array(cursor: _Cursor, key: str) -> Any:
    kind = cursor.number("I", f"the type of {key}")
    count = cursor.number("Q", f"the length of {key}")
    cursor.count_elements(count, key)
    if kind in _NUMBERS:
        if _NUMBERS[kind] == "f":
            cursor.arrays[key] = TensorEntry(key, "F32", (count,), cursor.source, cursor.position, 4 * count)
        return cursor.numbers(_NUMBERS[kind], count, key)
    if kind == _BOOL:
        return [cursor.boolean(key) for _ in range(count)]
    if kind == _STRING:
        what = f"an element of {key}"
        cursor.need(8 * count, key)  # a string takes at least its length
        return [cursor.text(what, _MAX_STRING) for _ in range(count)]
    raise cursor.fail(f"{key} is an array of the unreadable type {kind}")


def _name(cursor: _Cursor, what: str) -> str:
    name = cursor.text(what, _MAX_NAME)
    if not name or one_line(name, _MAX_NAME) != name:
        raise cursor.fail(f"{what} {name!r:.80} is empty or holds forbidden characters")
    return name


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        key = _name(cursor, "a key")
        if key in values:
            raise cursor.fail(f"the key {key} occurs twice")
        values[key] = _value(cursor, key)
    return values


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", ALIGNMENT)
    if type(value) is not int or not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
        raise cursor.fail(f"general.alignment {value!r:.40} is not a power of two up to {_MAX_ALIGNMENT}")
    return value


def _type(cursor: _Cursor, name: str) -> GgmlType:
    number = cursor.number("I", f"the type of {name}")
    if number in REMOVED:
        kind = f"{REMOVED[number]} in an order of rows for some processors"
        raise ModelError(
            f"{cursor.source}: {name} is {kind}, which is not supported", f"use the {REMOVED[number]} file"
        )
    if number not in BY_ID:
        hint = "the file may be damaged, or its type newer than this program"
        raise ModelError(f"{cursor.source}: {name} has the unknown ggml type {number}", hint)
    return BY_ID[number]


def _tensor(cursor: _Cursor) -> TensorEntry:
    name = _name(cursor, "a tensor's name")
    dimensions = cursor.number("I", f"the dimensions of {name}")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.fail(f"{name} has {dimensions} dimensions, 1 to {_MAX_DIMENSIONS} are allowed")
    shape = tuple(reversed([cursor.number("Q", f"the shape of {name}") for _ in range(dimensions)]))
    kind = _type(cursor, name)
    offset = cursor.number("Q", f"the offset of {name}")
    if min(shape) == 0 or math.prod(shape) >= _LIMIT:
        raise cursor.fail(f"{name} has the impossible shape {list(shape)}")
    if shape[-1] % kind.block:
        raise cursor.fail(
            f"{name} has rows of {shape[-1]} values, which do not fill blocks of {kind.block} ({kind.name})"
        )
    nbytes = math.prod(shape) // kind.block * kind.nbytes
    if nbytes >= _LIMIT or offset >= _LIMIT:
        raise cursor.fail(f"{name} of shape {list(shape)} overflows 64 bits")
    return TensorEntry(name, kind.name, shape, cursor.source, offset, nbytes)


def _place(cursor: _Cursor, tensors: list[TensorEntry], alignment: int, size: int) -> dict[str, TensorEntry]:
    # In the table, offsets count from the start of the data. Tensors must be in order, aligned and without gaps.
    start = -(-cursor.position // alignment) * alignment
    placed: dict[str, TensorEntry] = {}
    position = 0
    for entry in tensors:
        if entry.name in placed:
            raise cursor.fail(f"the tensor {entry.name} occurs twice")
        if entry.offset != position:
            raise cursor.fail(f"{entry.name} has offset {entry.offset}, expected {position}")
        if start + position + entry.nbytes > size:
            missing = start + position + entry.nbytes - size
            raise damaged(f"{cursor.source}: truncated: {missing} bytes of {entry.name} are missing")
        placed[entry.name] = TensorEntry(
            entry.name, entry.dtype, entry.shape, entry.file, start + position, entry.nbytes
        )
        position += -(-entry.nbytes // alignment) * alignment
    return placed


def parse_gguf_header(read: Reader, size: int, source: str) -> GgufHeader:
    """Parse the header of a file of `size` bytes; `source` becomes `TensorEntry.file` and the name in errors.

    Raises ModelError naming the file, the key or tensor, and the byte.
    """
    cursor = _Cursor(read, size, source)
    # Compared before the size: a page of an error or a text in place of the model may be shorter than a header.
    if not MAGIC.startswith(cursor.prefix(len(MAGIC))):
        raise damaged(f"{source}: not a GGUF file")
    cursor.need(24, "the header")
    cursor.position = len(MAGIC)
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        problem = "a big-endian GGUF file" if swapped else f"GGUF version {version}"
        raise ModelError(
            f"{source}: {problem}, which is not supported", "convert the model again with a current converter"
        )
    tensors, keys = cursor.number("Q", "the number of tensors"), cursor.number("Q", "the number of keys")
    if tensors > _MAX_TENSORS or keys > _MAX_KEYS:
        raise cursor.fail(f"{tensors} tensors and {keys} keys, more than the {_MAX_TENSORS} and {_MAX_KEYS} allowed")
    metadata = _metadata(cursor, keys)
    alignment = _alignment(cursor, metadata)
    table = [_tensor(cursor) for _ in range(tensors)]
    return GgufHeader(Fields(metadata, source), _place(cursor, table, alignment, size), cursor.arrays)
