"""Build hostile GGUF files: `ATTACKS` maps a fault to its bytes and the expected error.

The bytes are assembled by hand from the format's description, without code of the reader under test. The faults are
those that ggml's own parser has had (counts and lengths that overflow or allocate without checking the file size, types
and dimensions out of range, tensors beyond the data, zero sizes and alignments, duplicate names), and those that the
format leaves undefined.
"""

import struct
from collections.abc import Callable

Attack = tuple[Callable[[], bytes], str]
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    """Encode an array: type, length and values."""
    return struct.pack("<IQ", kind, count) + values


def info(name: bytes, shape: tuple[int, ...] = (2,), kind: int = 0, offset: int = 0, dimensions: int = -1) -> bytes:
    """Encode one entry of the tensor table; dimensions are in ggml's order."""
    count = len(shape) if dimensions < 0 else dimensions
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, offset)


def gguf(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = bytes(32),
    *,
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = len(tensors) if tensor_count is None else tensor_count, len(keys) if key_count is None else key_count
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


ONE = info(b"a")
NAME = key(b"general.name", STRING, text(b"x"))


def _nested(depth: int) -> bytes:
    return array(ARRAY, 1) * depth + array(U8, 1, b"\0")


_HUGE = (1 << 64) - 1
ATTACKS: dict[str, Attack] = {
    "empty": (lambda: b"", "truncated"),
    "magic-only": (lambda: b"GGUF", "truncated"),
    "other-magic": (lambda: b"GGML" + bytes(60), "not a GGUF file"),
    "version-1": (lambda: gguf(version=1), "version 1"),
    "version-4": (lambda: gguf(version=4), "version 4"),
    "big-endian": (lambda: gguf(version=0x03000000), "big-endian"),
    "keys-2^64": (lambda: gguf(key_count=_HUGE), "more than"),
    "keys-beyond-the-file": (lambda: gguf((NAME,), data=b"", key_count=9, alignment=1), "truncated"),
    "tensors-2^64": (lambda: gguf(tensor_count=_HUGE), "more than"),
    "tensors-2^63": (lambda: gguf(tensor_count=1 << 63), "more than"),
    "tensors-beyond-the-file": (lambda: gguf((), (ONE,), tensor_count=50), "a tensor's name|truncated"),
    "key-length-2^64": (lambda: gguf((struct.pack("<Q", _HUGE) + b"a",)), "more than"),
    "key-length-overflows-position": (lambda: gguf((struct.pack("<Q", _HUGE - 23) + b"a",)), "more than"),
    "key-beyond-the-file": (lambda: gguf((struct.pack("<Q", 200) + b"a",)), "truncated"),
    "key-empty": (lambda: gguf((key(b"", U8, b"\0"),)), "empty"),
    "key-with-escape": (lambda: gguf((key(b"a\x1b[2J", U8, b"\0"),)), "forbidden"),
    "key-with-newline": (lambda: gguf((key(b"a\nerror: x", U8, b"\0"),)), "forbidden"),
    "key-not-utf8": (lambda: gguf((key(b"\xff\xfe", U8, b"\0"),)), "UTF-8"),
    "key-twice": (lambda: gguf((NAME, NAME)), "twice"),
    "value-not-utf8": (lambda: gguf((key(b"a", STRING, text(b"\xc3\x28")),)), "UTF-8"),
    "string-2^64": (lambda: gguf((key(b"a", STRING, struct.pack("<Q", _HUGE)),)), "more than"),
    "string-beyond-the-file": (lambda: gguf((key(b"a", STRING, struct.pack("<Q", 1 << 20)),)), "truncated"),
    "unknown-value-type": (lambda: gguf((key(b"a", 13, b"\0"),)), "unknown type 13"),
    "negative-value-type": (lambda: gguf((key(b"a", 0xFFFFFFFF, b"\0"),)), "unknown type"),
    "boolean-2": (lambda: gguf((key(b"a", BOOL, b"\x02"),)), "boolean"),
    "array-2^64": (lambda: gguf((key(b"a", ARRAY, array(U8, _HUGE)),)), "more than"),
    "array-size-overflows": (lambda: gguf((key(b"a", ARRAY, array(U64, 1 << 61)),)), "more than"),
    "array-beyond-the-file": (lambda: gguf((key(b"a", ARRAY, array(F64, 1 << 20)),)), "truncated"),
    "array-of-strings-beyond": (lambda: gguf((key(b"a", ARRAY, array(STRING, 1 << 21)),)), "truncated"),
    "arrays-of-2^22-together": (
        lambda: gguf(tuple(key(b"%d" % i, ARRAY, array(U8, 1 << 20, bytes(1 << 20))) for i in range(4))),
        "all arrays have more than",
    ),
    "array-of-unknown": (lambda: gguf((key(b"a", ARRAY, array(99, 1, b"\0")),)), "unreadable type"),
    "array-of-arrays": (lambda: gguf((key(b"a", ARRAY, _nested(1)),)), "unreadable type"),
    "array-nested-10000": (lambda: gguf((key(b"a", ARRAY, _nested(10_000)),)), "unreadable type"),
    "alignment-0": (lambda: gguf((key(b"general.alignment", U32, bytes(4)),), (ONE,)), "general.alignment"),
    "alignment-3": (lambda: gguf((key(b"general.alignment", U32, struct.pack("<I", 3)),), (ONE,)), "alignment"),
    "alignment-2^31": (lambda: gguf((key(b"general.alignment", U32, struct.pack("<I", 1 << 31)),)), "alignment"),
    "alignment-text": (lambda: gguf((key(b"general.alignment", STRING, text(b"32")),)), "alignment"),
    "no-dimensions": (lambda: gguf((), (info(b"a", ()),)), "0 dimensions"),
    "five-dimensions": (lambda: gguf((), (info(b"a", (1,) * 5),)), "5 dimensions"),
    "dimensions-2^32": (lambda: gguf((), (info(b"a", (1,), dimensions=0xFFFFFFFF),)), "dimensions"),
    "dimension-0": (lambda: gguf((), (info(b"a", (0, 4)),)), "impossible shape"),
    "dimension-2^64": (lambda: gguf((), (info(b"a", (_HUGE,)),)), "impossible shape"),
    "product-overflows-to-0": (lambda: gguf((), (info(b"a", (1 << 32, 1 << 32)),)), "impossible shape"),
    "product-overflows-small": (lambda: gguf((), (info(b"a", (1 << 33, (1 << 31) + 1)),)), "impossible shape"),
    "product-negative": (lambda: gguf((), (info(b"a", ((1 << 63) - 1, 2), kind=24),)), "impossible shape"),
    "product-of-blocks-overflows": (lambda: gguf((), (info(b"a", (1024, (1 << 54) + 1), kind=2),)), "impossible shape"),
    "bytes-overflow": (lambda: gguf((), (info(b"a", (1 << 61, 2)),)), "overflows"),
    "bytes-overflow-when-padded": (lambda: gguf((), (info(b"a", ((1 << 61) - 1,)),)), "truncated"),
    "sizes-overflow-together": (
        lambda: gguf((), tuple(info(b"%d" % i, (1 << 60,), offset=(i << 62) % (1 << 64)) for i in range(5))),
        "truncated|overflows",
    ),
    "dimension-0-of-2": (lambda: gguf((), (info(b"a", (4, 0)),)), "impossible shape"),
    "dimension-0-of-4": (lambda: gguf((), (info(b"a", (4, 1, 1, 0)),)), "impossible shape"),
    "unknown-type": (lambda: gguf((), (info(b"a", kind=200),)), "unknown ggml type 200"),
    "interleaved-type": (
        lambda: gguf((), (info(b"a", (32,), kind=31),)),
        "a is Q4_0 in an order of rows for some processors",
    ),
    "removed-type": (lambda: gguf((), (info(b"a", (32,), kind=4),)), "unknown ggml type 4"),
    "rows-of-half-blocks": (lambda: gguf((), (info(b"a", (48,), kind=2),)), "do not fill blocks of 32"),
    "offset-unaligned": (lambda: gguf((), (info(b"a", offset=8),)), "has offset .*, expected"),
    "offset-2^64": (lambda: gguf((), (info(b"a", offset=_HUGE),)), "overflows|its place"),
    "offset-beyond-the-file": (lambda: gguf((), (info(b"a", offset=1 << 40),)), "has offset .*, expected"),
    "overlapping": (lambda: gguf((), (ONE, info(b"b")), bytes(64)), "has offset .*, expected"),
    "gap": (lambda: gguf((), (ONE, info(b"b", offset=64)), bytes(96)), "has offset .*, expected"),
    "tensor-twice": (lambda: gguf((), (ONE, ONE), bytes(64)), "twice"),
    "data-missing": (lambda: gguf((), (ONE,), b"")[:-1] + b"", "truncated"),
    "data-one-byte-short": (lambda: gguf((), (ONE,), bytes(7)), "truncated"),
    "name-empty": (lambda: gguf((), (info(b""),)), "empty"),
    "name-too-long": (lambda: gguf((), (info(b"a" * 5000),)), "more than"),
    "data-of-a-larger-tensor": (lambda: gguf((), (info(b"a", (1 << 20, 1024)),), bytes(8192)), "truncated"),
    "name-with-NUL": (lambda: gguf((), (info(b"a\0b"),)), "forbidden"),
}
