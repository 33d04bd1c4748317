"""The native library of this machine, which came with the installation or is built here, once; and its functions.

What is built is kept under `$XDG_CACHE_HOME/mycli/kernels`, named by a hash of everything it depends on, and moved into
place whole, so that processes may race. Knows C signatures and where libraries lie; not what a product is.
"""

import ctypes
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mycli.runtime.device.system import cpu
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import isa, prebuilt
from mycli.runtime.kernels.cpu.library.compiler import (
    FLAGS,
    BuildError,
    compile_sources,
    digest,
    find_compiler,
    read_sources,
    torch_openmp,
)

THIS_MACHINE = "-march=native"
# `Type` of packed_layout.h: of activations, and of what is stored.
ROW_TYPES = {torch.float32: 0, torch.bfloat16: 1}
STORED_TYPES = {**ROW_TYPES, torch.float16: 2}
LANES = 16  # of `V16` of vectors.h


class CWeight(ctypes.Structure):
    """`Weight` of packed_cpu.cpp."""

    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("factors", c_void_p),
        ("rows", c_int64),
        ("inputs", c_int64),
        ("group", c_int64),
        *((name, c_int32) for name in ("bits", "scale_type", "e2m1")),
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
        *((name, c_int32) for name in ("query_type", "cache_type", "out_type")),
    ]


class CNorm(ctypes.Structure):
    """`Norm` of steps.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "gain", "y")),
        *((name, c_int64) for name in ("rows", "size")),
        ("eps", c_float),
        *((name, c_int32) for name in ("type", "gain_type", "centred")),
    ]


class CRotateTask(ctypes.Structure):
    """`RotateTask` of steps.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "cos", "sin", "out")),
        *((name, c_int64) for name in ("sequences", "tokens", "heads", "head_dim", "half")),
        *((name, c_int64) for name in ("sequence_stride", "token_stride")),
        ("interleaved", c_int32),
    ]


class CRounding(ctypes.Structure):
    """`Rounding` of quantize_cpu.cpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "importance", "factors", "scales", "codes", "sums")),
        *((name, c_int64) for name in ("rows", "inputs", "group", "factor_count", "refits")),
        *((name, c_int32) for name in ("weight_type", "scale_type", "bits", "search")),
        *((name, c_float) for name in ("divisor", "smallest", "largest", "limit")),
    ]


class CColumns(ctypes.Structure):
    """`Columns` of quantize_cpu.cpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("residual", "matrix", "scales", "before", "codes", "shifts")),
        *((name, c_int64) for name in ("columns", "rows")),
        ("half", c_float),
    ]


@dataclass(frozen=True)
class Native:
    """The functions of the C++ sources, where they are described; addresses are `data_ptr()`."""

    repack: Callable[..., int | None]
    dequantize: Callable[..., int | None]
    matmul: Callable[..., int]
    dense: Callable[..., int]
    attend: Callable[..., int]
    pack_int4: Callable[..., int]
    softmax_draw: Callable[..., int]
    best: Callable[..., int | None]
    norm: Callable[..., int | None]
    gate: Callable[..., int | None]
    weigh: Callable[..., int | None]
    rotate: Callable[..., int | None]
    run_parts: Callable[..., int]
    run_head: Callable[..., int]
    run_passes: Callable[..., int]
    convolve: Callable[..., int | None]
    delta: Callable[..., int | None]
    gated_norm: Callable[..., int | None]
    read: Callable[..., int]
    table_matmul: Callable[..., int | None]
    table_dequantize: Callable[..., int | None]
    round_weight: Callable[..., int]
    pack_codes: Callable[..., int | None]
    solve_columns: Callable[..., int | None]
    experts_matmul: Callable[..., int]
    experts_route: Callable[..., int]
    experts_sum: Callable[..., int | None]
    isa: str  # the instructions used for products: one of `isa.SETS` or `isa.ARM_SETS`, or "plain"
    path: Path
    compiled: Declined | None = None  # why it was compiled here; None: it came with the installation


def load_library(path: Path, compiled: Declined | None = None) -> Native:
    """The library at `path`, which finds torch's OpenMP in the process. Raises OSError where it cannot be loaded."""
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
        dense=function("dense_matmul", c_int, c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int),
        attend=function("attend", c_int, ctypes.POINTER(CAttention), c_int),
        pack_int4=function("pack_int4", c_int, c_void_p, c_int32, c_int64, c_int64, c_void_p, c_int),
        best=function("best", None, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int),
        softmax_draw=function("draw", c_int64, c_void_p, c_int64, c_double, c_void_p),
        norm=function("norm", None, ctypes.POINTER(CNorm), c_int),
        gate=function("gate", None, c_int32, c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int),
        weigh=function("weigh", None, c_int32, c_void_p, c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int),
        rotate=function("rotate", None, ctypes.POINTER(CRotateTask), c_int),
        run_parts=function("run_parts", c_int, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int),
        run_head=function("run_head", c_int, c_void_p, c_int64, c_void_p, c_void_p, c_int),
        run_passes=function("run_passes", c_int, c_void_p, c_int64, *[c_void_p] * 3, c_int64, *[c_void_p] * 2, c_int),
        convolve=function("convolve", None, c_void_p, c_void_p, c_int),
        delta=function("delta_rule", None, c_void_p, c_void_p, c_int),
        gated_norm=function("gated_norm", None, c_void_p, c_int32, c_int),
        read=function("read_memory", c_int64, c_void_p, c_int64, c_int),
        table_matmul=function("table_matmul", None, table, c_void_p, c_int64, c_void_p, c_int),
        table_dequantize=function("table_dequantize", None, table, c_int64, c_int64, c_void_p, c_int32, c_int),
        round_weight=function("round_weight", c_int, ctypes.POINTER(CRounding), c_int),
        pack_codes=function("pack_codes", None, c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int64, c_int),
        solve_columns=function("solve_columns", None, ctypes.POINTER(CColumns), c_int),
        experts_matmul=function("experts_matmul", c_int, c_void_p, c_int),
        experts_route=function("experts_route", c_int64, c_void_p, c_int),
        experts_sum=function("experts_sum", None, c_void_p, c_int),
        isa=function("packed_isa", c_char_p)().decode(),
        path=path,
        compiled=compiled,
    )


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
        raise BuildError(Declined("compiles-on-linux-only", {"system": platform.system()}))
    compiler, version = find_compiler()
    openmp, sources, flags = torch_openmp(), read_sources(), (*FLAGS, THIS_MACHINE, *extra_flags)
    key = digest(sources, version, _processor(), torch.__version__, openmp, *flags)
    return _Recipe(compiler, flags, openmp, sources, f"packed_cpu-{key}.so")


def compile_library(folder: Path, extra_flags: Sequence[str] = ()) -> Path:
    """The library for this machine in `folder`, built unless it is there. Raises BuildError saying what failed."""
    recipe = _recipe(tuple(extra_flags))
    compiler, target = recipe.compiler, folder / recipe.name
    if target.exists():
        return target
    # With -fopenmp the link would bring the system's OpenMP beside torch's.
    compile_sources(compiler, recipe.sources, recipe.flags, ("-Wl,-z,defs", recipe.openmp), target)
    return target


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where built libraries are kept: `mycli/kernels` under $XDG_CACHE_HOME."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "mycli" / "kernels"


@dataclass(frozen=True)
class _Choice:
    flags: tuple[str, ...]  # to compile with
    prebuilt: Path | Declined


def _choose() -> _Choice:
    """Raises UsageError as `isa.asked` does."""
    processor = cpu()
    asked = isa.asked(processor.flags)
    flags = isa.compiler_flags(asked, processor)
    return _Choice(flags, prebuilt.find(isa.portable_name(asked, processor)))


@cache  # one library a process: finding the compiler takes longer than a product
def native() -> Native | Declined:
    """The functions for this machine, or the reason why there are none. Raises UsageError as `isa.asked` does."""
    choice = _choose()
    declined = choice.prebuilt
    if isinstance(declined, Path):
        try:
            prebuilt.show_openmp()
            return load_library(declined)
        except (BuildError, OSError) as error:
            declined = _declined(error)
    try:
        return load_library(compile_library(cache_folder(), choice.flags), declined)
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        return Declined("no-native-library", {"compile": _declined(error), "prebuilt": declined})


def _declined(error: Exception) -> Declined:
    return error.declined if isinstance(error, BuildError) else Declined("system-error", {"error": str(error)})


def must_be_built() -> bool:
    """Whether the first call of `native` will take seconds, because it compiles. Raises UsageError as that does."""
    choice = _choose()
    if isinstance(choice.prebuilt, Path):
        return False
    try:
        return not (cache_folder() / _recipe(choice.flags).name).exists()
    except (BuildError, OSError, subprocess.SubprocessError):
        return False  # and `native` says why
