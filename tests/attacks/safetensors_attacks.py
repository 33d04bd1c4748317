"""Build hostile safetensors files: `ATTACKS` maps a fault to its bytes and the expected error.

The bytes are assembled by hand from the format's description, without code of the reader under test.
"""

import json
import struct
from collections.abc import Callable
from typing import Any

Attack = tuple[Callable[[], bytes], str]


def raw(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def file(tensors: dict[str, Any], data: bytes = b"") -> bytes:
    return raw(json.dumps(tensors).encode(), data)


def tensor(begin: Any = 0, end: Any = 8, shape: Any = (2,), dtype: Any = "F32", **more: Any) -> dict[str, Any]:
    """Return the header entry of one tensor, by default two float32."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def simple(**tensors: tuple[str, tuple[int, ...], bytes]) -> bytes:
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = tensor(len(data), len(data) + len(content), shape, dtype)
        data += content
    return file(header, data)


def _one(name: str = "a", **changes: Any) -> Callable[[], bytes]:
    return lambda: file({name: tensor(**changes)}, bytes(8))


_A = '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
_NAMES = {
    "NUL": "a\0b",
    "newline": "a\nerror: forged",
    "ESC": "a\x1b]52;c;AAAA\x07",
    "C1": "a\x9b31m",
    "bidi": "a\u202eb",
    "surrogate": "a\ud800",
    "traversal": "../../etc/passwd",
    "windows-traversal": "..\\..\\boot.ini",
    "10kB": "a" * 10_000,
    "empty": "",
}

ATTACKS: dict[str, Attack] = {
    "A1-empty": (lambda: b"", "empty file"),
    "A1-seven-bytes": (lambda: b"\x08\0\0\0\0\0\0", "truncated"),
    "A1-length-only": (lambda: struct.pack("<Q", 0), "truncated"),
    "A2-header-beyond-file": (lambda: struct.pack("<Q", 1000) + b'{"a":1}', "truncated: header of 1000 bytes"),
    "A2-header-one-short": (lambda: struct.pack("<Q", 9) + b'{"a": 1}', "truncated: header"),
    "A3-length-2^63": (lambda: struct.pack("<Q", 1 << 63) + b"{}" * 8, "more than the 33554432 allowed"),
    "A3-length-2^64-1": (lambda: b"\xff" * 8 + b"{}" * 8, "more than the 33554432 allowed"),
    "A3-length-over-cap": (lambda: raw(b"{" + b" " * (32 << 20) + b"}"), "more than the 33554432 allowed"),
    "A4-overlap": (lambda: file({"a": tensor(), "b": tensor(4, 12)}, bytes(12)), "b overlaps"),
    "A4-same-bytes": (lambda: file({"a": tensor(), "b": tensor()}, bytes(8)), "b overlaps"),
    "A4-empty-inside": (lambda: file({"a": tensor(), "b": tensor(4, 4, [0])}, bytes(8)), "a overlaps|b overlaps"),
    "A5-hole": (lambda: file({"a": tensor(), "b": tensor(12, 20)}, bytes(20)), "4 unused bytes before b"),
    "A5-hole-at-start": (lambda: file({"a": tensor(4, 12)}, bytes(12)), "4 unused bytes before a"),
    "A5-trailing": (lambda: file({"a": tensor()}, bytes(8) + b"PK\x03\x04"), "4 unused bytes after"),
    "A5-no-tensors-but-data": (lambda: file({}, bytes(8)), "8 unused bytes after"),
    "A6-one-byte-short": (lambda: file({"a": tensor()}, bytes(7)), "truncated"),
    "A7-negative-offset": (_one(begin=-8, end=0), "data_offsets"),
    "A7-float-offset": (_one(begin=0.0, end=8.0), "data_offsets"),
    "A7-boolean-offset": (_one(begin=False), "data_offsets"),
    "A7-string-offset": (_one(begin="0"), "data_offsets"),
    "A7-offset-2^64": (_one(begin=1 << 64, end=(1 << 64) + 8), "data_offsets"),
    "A7-reversed": (_one(begin=8, end=0), "its offsets hold -8"),
    "A7-three-offsets": (
        lambda: raw(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}}', bytes(8)),
        "data_offsets",
    ),
    "A7-no-list": (lambda: raw(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":8}}', bytes(8)), "data_offsets"),
    "A8-shape-too-large": (_one(shape=[3]), "takes 12 bytes"),
    "A8-shape-too-small": (_one(shape=[1]), "takes 4 bytes"),
    "A8-scalar": (_one(shape=[]), "takes 4 bytes"),
    "A8-negative-dimension": (_one(shape=[-2]), "no valid shape"),
    "A8-float-dimension": (_one(shape=[2.0]), "no valid shape"),
    "A8-boolean-dimension": (_one(shape=[True, 2]), "no valid shape"),
    "A8-100-dimensions": (_one(shape=[1] * 99 + [2]), "no valid shape"),
    "A9-product-overflows": (_one(shape=[1 << 62, 1 << 62]), "overflows"),
    "A9-wraps-to-8-bytes": (_one(shape=[(1 << 62) + 2, 1]), "overflows"),
    "A9-5000-digits": (
        lambda: raw(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}'),
        "JSON",
    ),
    "A10-unknown": (_one(dtype="F99"), "a has dtype 'F99'"),
    "A10-F4": (_one(dtype="F4"), "a has dtype 'F4'"),
    "A10-F8": (_one(dtype="F8_E3M4", shape=[8]), "a has dtype 'F8_E3M4'"),
    "A10-complex": (_one(dtype="C64", shape=[1]), "a has dtype 'C64'"),
    "A10-list": (_one(dtype=["F32"]), "has dtype"),
    "A11-duplicate-name": (lambda: raw(f"{{{_A},{_A}}}".encode(), bytes(8)), "duplicate key 'a'"),
    "A11-duplicate-field": (
        lambda: raw(b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        "duplicate key 'dtype'",
    ),
    "A11-extra-field": (_one(note="x"), "must have exactly"),
    "A11-missing-field": (lambda: raw(b'{"a":{"dtype":"F32","shape":[2]}}', bytes(8)), "must have exactly"),
    "A11-no-object": (lambda: raw(b'{"a":[1]}', bytes(8)), "must have exactly"),
    "A13-too-many-tensors": (lambda: raw(b"{" + _A.encode() + b"," + b'"b":{},' * 1_400_000), "more than the 1400000"),
    "A13-too-many-values": (lambda: raw(b'{"a":[' + b"0," * 1_400_001 + b"0]}"), "more than the 1400000 values"),
    "A14-deep-lists": (lambda: raw(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "nested too deeply"),
    "A14-deep-objects": (lambda: raw(b'{"a":' * 200_000 + b"1" + b"}" * 200_000), "nested too deeply"),
    **{f"A15-name-{case}": (_one(name), "tensor name") for case, name in _NAMES.items()},
    "A16-metadata-number": (lambda: file({"__metadata__": {"format": 1}}), "strings to strings"),
    "A16-metadata-list": (lambda: file({"__metadata__": ["pt"]}), "strings to strings"),
    "A16-metadata-10MB": (
        lambda: file({"__metadata__": {"x": "y" * 10_000_000}}),
        "__metadata__ of 10000001 characters",
    ),
    "A17-invalid-utf8": (lambda: raw(b'{"\xff\xfe":' + _A[4:].encode() + b"}", bytes(8)), "not acceptable JSON"),
    "A17-not-json": (lambda: raw(b"{'a': 1}"), "not JSON"),
    "A17-nan": (lambda: raw(b'{"a":NaN}'), "NaN is not JSON"),
    "A17-two-objects": (lambda: raw(b"{}{}"), "not JSON"),
    "A17-list": (lambda: raw(b"[1,2,3]"), "not a JSON object"),
    "A18-html": (lambda: b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "an HTML or XML page"),
    "A18-html-after-space": (lambda: b"\n\n <html><body>Sign in</body></html>", "an HTML or XML page"),
    "A18-lfs-pointer": (
        lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
        "a git-lfs pointer",
    ),
    "A18-json-error": (lambda: b'{"error": "Invalid credentials"}', "a JSON text"),
    "A18-gguf": (lambda: b"GGUF" + struct.pack("<IQQ", 3, 2, 5) + bytes(64), "a GGUF file"),
    "A18-gguf-of-123-tensors": (lambda: b"GGUF" + struct.pack("<IQQ", 3, 123, 5) + bytes(64), "a GGUF file"),
    "A18-zip": (lambda: b"PK\x03\x04\x14\0\0\0\0\0" + bytes(64), "a zip archive"),
    "A18-pickle-2": (lambda: b"\x80\x02}q\0X\x06\0\0\0weight" + bytes(64), "a Python pickle"),
    "A18-pickle-4": (lambda: b"\x80\x04\x95\x10\0\0\0\0\0\0\0}" + bytes(64), "a Python pickle"),
    "A18-gzip": (lambda: b"\x1f\x8b\x08\0\0\0\0\0\x02\xff" + bytes(600_000), "a gzip archive"),
    # A header of 640 bytes begins with the same bytes as a pickle; when truncated, it must be reported as safetensors.
    "A18-truncated-640": (lambda: raw(b'{"a":' + b" " * 634 + b"}")[:300], "truncated: header of 640"),
}


# Shard names in an index that must never be opened.
SHARD_NAMES = {
    "A20-traversal": "../../etc/passwd",
    "A20-traversal-safetensors": "../model.safetensors",
    "A20-subfolder": "sub/model.safetensors",
    "A20-absolute": "/etc/model.safetensors",
    "A20-drive": "C:\\model.safetensors",
    "A20-drive-relative": "C:model.safetensors",
    "A20-stream": "model.safetensors:x.safetensors",
    "A20-windows-traversal": "..\\model.safetensors",
    "A20-UNC": "\\\\host\\share\\model.safetensors",
    "A20-NUL": "model\0.safetensors",
    "A20-newline": "model\n.safetensors",
    "A20-empty": "",
    "A20-dots": "..",
    "A20-10kB": "a" * 10_000 + ".safetensors",
    "A20-number": 7,
    "A20-list": ["model.safetensors"],
    "A21-bin": "pytorch_model.bin",
    "A21-pt": "model.pt",
    "A21-bin-after": "model.safetensors.bin",
    "A21-config": "config.json",
}
