"""Runs the native code compiled for ARM in qemu: a library whose functions operate on this process's memory.

A call writes its inputs to a file, with the addresses within them, and reads back the memory that the emulated program
left there. Needs Debian's g++-aarch64-linux-gnu and qemu-user; has a fixed list of buffer sizes for the functions
below.
"""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mycli.runtime.kernels.cpu.library.build import CAttention, CTableWeight, CWeight
from mycli.runtime.kernels.cpu.library.compiler import FLAGS, compile_sources, digest, read_sources
from mycli.runtime.quantization.int4_vectors import int4_groups
from tests.support.native_code import FOLDER

COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
MISSING = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
# With byte dot products (Cortex-A76, Graviton 2 and later), and the 64-bit ARM baseline; -O1 compiles faster.
SETS: Mapping[str, tuple[str, ...]] = {
    "dotprod": ("-march=armv8.2-a+dotprod", "-O1"),
    "dotprod-fast": ("-march=armv8.2-a+dotprod",),
    "neon": ("-march=armv8-a",),
}
_CALLER = Path(__file__).with_name("native_call.cpp")
_NAME = 32


@dataclass(frozen=True)
class Buffer:
    """Describes memory that a function reads or writes; `holds`: other buffers by the offset of their address."""

    address: int
    nbytes: int
    holds: Mapping[int, "Buffer"] = field(default_factory=dict)


class EmulatedArm:
    """Implements the part of `runtime.kernels.cpu.library.build.Native` that tests call, with the same arguments."""

    def __init__(self, folder: Path, name: str) -> None:
        flags, sources = (*FLAGS, *SETS[name]), read_sources()
        self._program, self._file = folder / "native_call", folder / "memory"
        self._library = FOLDER / f"arm-{digest(sources, *flags)}.so"
        if not self._library.exists():
            compile_sources(COMPILER, sources, flags, ("-fopenmp",), self._library)
        subprocess.run([COMPILER, *FLAGS, str(_CALLER), "-o", str(self._program)], check=True)

    def repack(self, weight: Any, packed: int, words: int, threads: int) -> None:
        one = weight.contents
        self._call("packed_repack", _weight(one), Buffer(packed, 4 * one.rows * words), words, threads)

    def dequantize(self, weight: Any, out: int, kind: int, threads: int) -> None:
        one = weight.contents
        self._call("packed_dequantize", _weight(one), Buffer(out, one.rows * one.inputs * _size(kind)), kind, threads)

    def matmul(self, weight: Any, x: int, kind: int, rows: int, y: int, threads: int) -> int:
        one, size = weight.contents, _size(kind) * rows
        given, out = Buffer(x, one.inputs * size), Buffer(y, one.rows * size)
        return self._call("packed_matmul", _weight(one), given, kind, rows, out, threads)

    def dense(
        self, kind: int, w: int, outputs: int, inputs: int, x: int, rows: int, y: int, portable: int, threads: int
    ) -> int:
        size = _size(kind)
        weight, given = Buffer(w, outputs * inputs * size), Buffer(x, rows * inputs * size)
        out = Buffer(y, rows * outputs * size)
        return self._call("dense_matmul", kind, weight, outputs, inputs, given, rows, out, portable, threads)

    def table_matmul(self, weight: Any, x: int, rows: int, y: int, threads: int) -> None:
        one = weight.contents
        self._call(
            "table_matmul", _table(one), Buffer(x, 4 * rows * one.inputs), rows, Buffer(y, 4 * rows * one.rows), threads
        )

    def attend_latent(self, task: Any, threads: int) -> int:
        return self._call("attend_latent", _latent(task._obj), threads)

    def attend(self, task: Any, threads: int) -> int:
        return self._call("attend", _attention(task._obj), threads)

    def _call(self, name: str, *arguments: int | Buffer) -> int:
        buffers: list[Buffer] = []
        given = [(1, _add(one, buffers)) if isinstance(one, Buffer) else (0, one) for one in arguments]
        numbers = {id(one): index for index, one in enumerate(buffers)}
        places = [(at, place, numbers[id(held)]) for at, one in enumerate(buffers) for place, held in one.holds.items()]
        counts = struct.pack("3q", len(buffers), len(places), len(given))
        rest = [one.nbytes for one in buffers] + [number for each in (*places, *given) for number in each]
        with self._file.open("wb") as file:
            file.write(counts + name.encode().ljust(_NAME, b"\0") + struct.pack(f"{len(rest)}q", *rest))
            for one in buffers:
                file.write(ctypes.string_at(one.address, one.nbytes))
        command = [EMULATOR, "-L", SYSTEM, str(self._program), str(self._library), str(self._file)]
        subprocess.run(command, check=True, timeout=300)
        left = self._file.read_bytes()
        at = 8
        for one in buffers:
            if not one.holds:  # pointers in memory are those of the emulated program
                ctypes.memmove(one.address, left[at : at + one.nbytes], one.nbytes)
            at += one.nbytes
        return int(struct.unpack_from("q", left)[0])


def _add(one: Buffer, buffers: list[Buffer]) -> int:
    """Append a buffer and those that it points to; return its number."""
    number = len(buffers)
    buffers.append(one)
    for held in one.holds.values():
        _add(held, buffers)
    return number


def _size(kind: int) -> int:
    """Return the bytes of an activation of `ROW_TYPES`."""
    return 4 if kind == 0 else 2


def _struct(one: ctypes.Structure, sizes: Mapping[str, int]) -> Buffer:
    """Return the buffer of a structure, including the memory that its fields point to."""
    held = {
        getattr(type(one), name).offset: Buffer(getattr(one, name), size)
        for name, size in sizes.items()
        if getattr(one, name)
    }
    return Buffer(ctypes.addressof(one), ctypes.sizeof(one), held)


def _weight(one: CWeight) -> Buffer:
    rows = -(-one.rows // 16) * 16
    scales, super_blocks = rows * one.inputs // one.group, rows * one.inputs // 256
    sizes = {
        "codes": rows * one.inputs * one.bits // 8,
        "scales": scales * (4, 2, 2, 1, 1, 1)[one.scale_type],
        "offsets": scales * (1 if one.factors else 4),
        "factors": rows * 8 if one.scale_type == 4 else super_blocks * 2 * (2 if one.offsets else 1),
    }
    return _struct(one, sizes)


def _table(one: CTableWeight) -> Buffer:
    scales = one.rows * (one.inputs // one.group)
    return _struct(one, {"codes": one.rows * one.stride, "scales": scales * _size(one.scale_type), "values": 64})


def _latent(one: Any) -> Buffer:
    """Return the buffer of the `_LatentTask` of `runtime.kernels.cpu.latent`, over a bf16, fp32 or int8 cache."""
    tokens = ctypes.c_int32.from_address(one.starts + 4 * one.sequences).value
    vectors, size = one.blocks * one.block_size, (4, 2, 1)[one.cache_type]
    sizes = {
        "query": tokens * one.heads * one.rank * _size(one.query_type),
        "rotated_query": tokens * one.heads * one.rope * _size(one.query_type),
        "latents": vectors * one.rank * size,
        "rotated": vectors * one.rope * size,
        "latent_scales": 4 * vectors,
        "rotated_scales": 4 * vectors,
        "out": tokens * one.heads * one.rank * _size(one.out_type),
        "starts": 4 * (one.sequences + 1),
        "lengths": 4 * one.sequences,
        "table": 4 * one.sequences * one.table_width,
    }
    return _struct(one, sizes)


def _attention(one: CAttention) -> Buffer:
    heads = one.kv_heads * one.group
    tokens = ctypes.c_int32.from_address(one.starts + 4 * one.sequences).value
    vectors = one.blocks * one.block_stride
    cache = vectors * one.head_dim * (8, 4, 2, 1)[one.cache_type] // 2
    scales = vectors * (2 * int4_groups(one.head_dim) if one.cache_type == 3 else 4)
    sizes = {
        "query": tokens * heads * one.head_dim * _size(one.query_type),
        "keys": cache,
        "values": cache,
        "key_scales": scales,
        "value_scales": scales,
        "sinks": heads * 4,
        "out": tokens * heads * one.head_dim * _size(one.out_type),
        "starts": (one.sequences + 1) * 4,
        "lengths": one.sequences * 4,
        "table": one.sequences * one.table_width * 4,
    }
    return _struct(one, sizes)
