"""Builds packed_cpu.cpp and its headers for this machine with the system's compiler, once, and loads it.

The library is kept under `$XDG_CACHE_HOME/mycli/kernels`, named by a hash of everything it depends on, and moved into
place whole, so that processes may race. Knows compilers, files and C signatures; not what a product is.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from mycli.runtime.device.system import cpu
from mycli.runtime.kernels.cpu import isa

SOURCE = "packed_cpu.cpp"
HEADERS = (
    "attention.h",
    "attention_float.h",
    "attention_task.h",
    "attention_tiles.h",
    "dense.h",
    "draw.h",
    "layer.h",
    "packed_integer.h",
    "packed_layout.h",
    "packed_panels.h",
    "packed_repack.h",
    "packed_tiles.h",
    "recurrent.h",
    "steps.h",
    "table.h",
    "vectors.h",
)
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi")
TIMEOUT = 300  # seconds for the compiler on a busy machine; it needs about ten


class BuildError(Exception):
    """Why there is no native library here."""


class CWeight(ctypes.Structure):
    """`Weight` of packed_cpu.cpp."""

    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("rows", c_int64),
        ("inputs", c_int64),
        ("group", c_int64),
        ("bits", c_int32),
        ("scale_type", c_int32),
    ]


class CTableWeight(ctypes.Structure):
    """`TableWeight` of table.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("codes", "scales", "values")),
        *((name, c_int64) for name in ("rows", "inputs", "stride", "group")),
        *((name, c_int32) for name in ("kind", "scale_type")),
    ]


class CAttention(ctypes.Structure):
    """`Attention` of attention_task.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "keys", "values", "key_scales", "value_scales", "sinks", "out")),
        *((name, c_void_p) for name in ("starts", "lengths", "table")),
        *((name, c_int64) for name in ("sequences", "table_width", "blocks", "block_size", "block_stride")),
        *((name, c_int64) for name in ("head_stride", "kv_heads", "group", "head_dim", "window")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("query_type", "cache_type")),
    ]


class CNorm(ctypes.Structure):
    """`Norm` of steps.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "gain", "y")),
        *((name, c_int64) for name in ("rows", "size")),
        ("eps", c_float),
        ("gain_type", c_int32),
    ]


class CRotation(ctypes.Structure):
    """`Rotation` of steps.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "cos", "sin", "out")),
        *((name, c_int64) for name in ("sequences", "tokens", "heads", "head_dim", "half")),
        *((name, c_int64) for name in ("sequence_stride", "token_stride")),
        ("interleaved", c_int32),
    ]


@dataclass(frozen=True)
class Native:
    """The functions of packed_cpu.cpp, where they are described; addresses are `data_ptr()`."""

    repack: Callable[..., int | None]
    dequantize: Callable[..., int | None]
    matmul: Callable[..., int]
    dense: Callable[..., int]
    attend: Callable[..., int]
    softmax_draw: Callable[..., int]
    norm: Callable[..., int | None]
    gate: Callable[..., int | None]
    rotate: Callable[..., int | None]
    attention_part: Callable[..., int]
    mlp_part: Callable[..., int]
    convolve: Callable[..., int | None]
    delta: Callable[..., int | None]
    gated_norm: Callable[..., int | None]
    read: Callable[..., int]
    table_matmul: Callable[..., int | None]
    table_dequantize: Callable[..., int | None]
    isa: str  # the instructions used for products: one of `isa.SETS`, or "plain"


def load_library(path: Path) -> Native:
    """The library at `path`; torch's OpenMP is in the process already. Raises OSError where it cannot be loaded."""
    library = ctypes.CDLL(str(path))

    def function(name: str, result: Any, *arguments: object) -> Callable[..., Any]:
        found = getattr(library, name)
        found.restype, found.argtypes = result, arguments
        return found  # type: ignore[no-any-return]  # ctypes' functions have no static type

    weight, table = ctypes.POINTER(CWeight), ctypes.POINTER(CTableWeight)
    return Native(
        repack=function("packed_repack", None, weight, c_void_p, c_int64, c_int),
        dequantize=function("packed_dequantize", None, weight, c_void_p, c_int32, c_int),
        matmul=function("packed_matmul", c_int, weight, c_void_p, c_int32, c_int64, c_void_p, c_int),
        dense=function("dense_matmul", c_int, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int),
        attend=function("attend", c_int, ctypes.POINTER(CAttention), c_int),
        softmax_draw=function("draw", c_int64, c_void_p, c_int64, c_double, c_void_p),
        norm=function("norm", None, ctypes.POINTER(CNorm), c_int),
        gate=function("gate", None, c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int),
        rotate=function("rotate", None, ctypes.POINTER(CRotation), c_int),
        attention_part=function("attention_part", c_int, *(c_void_p,) * 5, c_int),
        mlp_part=function("mlp_part", c_int, c_void_p, c_int64, c_void_p, c_void_p, c_int),
        convolve=function("convolve", None, c_void_p, c_void_p, c_int),
        delta=function("delta_rule", None, c_void_p, c_void_p, c_int),
        gated_norm=function("gated_norm", None, c_void_p, c_int32, c_int),
        read=function("read_memory", c_int64, c_void_p, c_int64, c_int),
        table_matmul=function("table_matmul", None, table, c_void_p, c_int64, c_void_p, c_int),
        table_dequantize=function("table_dequantize", None, table, c_int64, c_int64, c_void_p, c_int32, c_int),
        isa=function("packed_isa", c_char_p)().decode(),
    )


def find_compiler(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """(path, version text) of GNU C++: $CXX, else g++, else c++. Raises BuildError.

    Clang does not share GNU's OpenMP library, which is the one torch brings: its threads would be a second pool.
    """
    for name in (environment.get("CXX"), "g++", "c++"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=TIMEOUT).stdout
        if "Free Software Foundation" in version:
            return os.path.abspath(path), version  # it is started in another folder
    raise BuildError("no GNU C++ compiler found (install g++, or set CXX)")


def _openmp() -> str:
    """The OpenMP library that torch has loaded into this process."""
    with open("/proc/self/maps") as maps:
        loaded: set[str] = set(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*)", maps.read()))
    torch_folder = str(Path(torch.__file__).parent)
    for path in sorted(loaded, key=lambda one: (not one.startswith(torch_folder), one)):
        return path
    raise BuildError("torch uses no OpenMP library here")


def _processor() -> str:
    """What -march=native looks at."""
    with open("/proc/cpuinfo") as info:
        lines = info.read().splitlines()
    return "\n".join(sorted({one for one in lines if re.match(r"(flags|Features|model|CPU (part|implementer))", one)}))


@dataclass(frozen=True)
class _Recipe:
    """What a build is made of, and the name it gets."""

    compiler: str
    flags: tuple[str, ...]
    openmp: str
    sources: Mapping[str, bytes]
    name: str


def _recipe(extra_flags: tuple[str, ...]) -> _Recipe:
    """For this machine. Raises BuildError saying what is missing."""
    if platform.system() != "Linux":
        raise BuildError(f"built on Linux only, not on {platform.system()}")
    compiler, version = find_compiler()
    package, openmp = files("mycli.runtime.kernels.cpu"), _openmp()
    sources = {name: package.joinpath(name).read_bytes() for name in (SOURCE, *HEADERS)}
    flags = (*FLAGS, *extra_flags)
    depends = (version, _processor(), torch.__version__, openmp, *flags)
    key = hashlib.sha256(b"\0".join(sources.values()) + "\0".join(depends).encode()).hexdigest()[:24]
    return _Recipe(compiler, flags, openmp, sources, f"packed_cpu-{key}.so")


def compile_library(folder: Path, extra_flags: Sequence[str] = ()) -> Path:
    """The library for this machine in `folder`, built unless it is there. Raises BuildError saying what failed."""
    recipe = _recipe(tuple(extra_flags))
    compiler, target = recipe.compiler, folder / recipe.name
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as work:
        for name, text in recipe.sources.items():
            (Path(work) / name).write_bytes(text)
        # Two steps: with -fopenmp the link would bring the system's OpenMP beside torch's.
        for command in (
            [compiler, *recipe.flags, "-c", SOURCE, "-o", "packed_cpu.o"],
            [compiler, "-shared", "-Wl,-z,defs", "packed_cpu.o", recipe.openmp, "-o", "packed_cpu.so"],
        ):
            try:
                done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                raise BuildError(f"{compiler} took more than {TIMEOUT} s") from None
            if done.returncode:
                words = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
                raise BuildError(f"{compiler} failed: {words[0] if words else done.returncode:.200}")
        os.replace(Path(work) / "packed_cpu.so", target)
    return target


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where built libraries are kept: `mycli/kernels` under $XDG_CACHE_HOME."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "mycli" / "kernels"


def _flags() -> tuple[str, ...]:
    """Beside `FLAGS`, for this machine and what is asked for. Raises UsageError where that cannot be had."""
    processor = cpu()
    return isa.compiler_flags(isa.asked(processor.flags), processor)


@cache  # one library a process: finding the compiler takes longer than a product
def native() -> Native | str:
    """The functions for this machine, or the reason why there are none. Raises UsageError as `isa.asked` does."""
    extra = _flags()
    try:
        return load_library(compile_library(cache_folder(), extra))
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        return str(error)


def must_be_built() -> bool:
    """Whether the first call of `native` will take seconds, because it compiles. Raises UsageError as that does."""
    extra = _flags()
    try:
        return not (cache_folder() / _recipe(extra).name).exists()
    except (BuildError, OSError, subprocess.SubprocessError):
        return False  # and `native` says why
