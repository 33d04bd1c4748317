"""Finds or compiles the native library of this machine, and declares its C functions and structures.

A prebuilt library of the installation is used if there is one for this processor. Otherwise the sources are compiled
once to `$XDG_CACHE_HOME/mycli/kernels`, under a hash of all inputs, and moved into place atomically, so that processes
may race.
"""

import ctypes
import errno
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
    no_space,
    read_sources,
    torch_openmp,
)
from mycli.runtime.kernels.cpu.library.seal import folder_problem, library_problem

THIS_MACHINE = "-march=native"
# `Type` of packed_layout.h: of activations, and of stored scales and weights.
ROW_TYPES = {torch.float32: 0, torch.bfloat16: 1}
STORED_TYPES = {**ROW_TYPES, torch.float16: 2}
LANES = 16  # floats of a `V16` of vectors.h


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's data; None for no tensor."""
    return None if tensor is None else tensor.data_ptr()


# Each C* structure mirrors the C++ structure of the same name without the C: same fields, same order.
class CWeight(ctypes.Structure):
    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("factors", c_void_p),
        ("rows", c_int64),
        ("inputs", c_int64),
        ("group", c_int64),
        *((name, c_int32) for name in ("bits", "scale_type", "kind", "activations")),
        ("unit", c_float),
    ]


class CTableWeight(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("codes", "scales", "values")),
        *((name, c_int64) for name in ("rows", "inputs", "stride", "group")),
        *((name, c_int32) for name in ("kind", "scale_type", "portable")),
    ]


class CAttention(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("query", "keys", "values", "key_scales", "value_scales", "sinks", "out")),
        *((name, c_void_p) for name in ("starts", "lengths", "table")),
        *((name, c_int64) for name in ("sequences", "table_width", "blocks", "block_size", "block_stride")),
        *((name, c_int64) for name in ("head_stride", "kv_heads", "group", "head_dim", "window")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("query_type", "cache_type", "out_type", "portable")),
    ]


class CNorm(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "gain", "bias", "y")),
        *((name, c_int64) for name in ("rows", "size")),
        ("eps", c_float),
        *((name, c_int32) for name in ("type", "gain_type", "centred")),
    ]


class CRotateTask(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "cos", "sin", "out")),
        *((name, c_int64) for name in ("sequences", "tokens", "heads", "head_dim", "half")),
        *((name, c_int64) for name in ("sequence_stride", "token_stride")),
        ("interleaved", c_int32),
    ]


class CRounding(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("weight", "importance", "factors", "scales", "codes", "sums")),
        *((name, c_int64) for name in ("rows", "inputs", "group", "factor_count", "refits")),
        *((name, c_int32) for name in ("weight_type", "scale_type", "bits", "search")),
        *((name, c_float) for name in ("divisor", "smallest", "largest", "limit")),
    ]


class CColumns(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("residual", "matrix", "scales", "before", "codes", "shifts")),
        *((name, c_int64) for name in ("columns", "rows")),
        ("half", c_float),
    ]


@dataclass(frozen=True)
class Native:
    """The functions of the library; addresses are `data_ptr()`. They are documented in the C++ sources."""

    repack: Callable[..., int | None]
    dequantize: Callable[..., int | None]
    matmul: Callable[..., int]
    dense: Callable[..., int]
    attend: Callable[..., int]
    attend_latent: Callable[..., int]
    head_product: Callable[..., int]
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
    scan: Callable[..., int | None]
    group_norm: Callable[..., int | None]
    read: Callable[..., int]
    table_matmul: Callable[..., int | None]
    table_dequantize: Callable[..., int | None]
    round_weight: Callable[..., int]
    pack_codes: Callable[..., int | None]
    solve_columns: Callable[..., int | None]
    rounded_matmul: Callable[..., int]
    rounded_outer: Callable[..., int]
    experts_matmul: Callable[..., int]
    experts_route: Callable[..., int]
    experts_sum: Callable[..., int | None]
    rounds: bool  # whether `rounded_matmul` and `rounded_outer` compute: elsewhere torch is as fast
    isa: str  # the instruction set of products: a name in `isa.SETS` or `isa.ARM_SETS`, or "plain"
    path: Path
    compiled: Declined | None = None  # why it was compiled on this machine; None: it is prebuilt


def load_library(path: Path, compiled: Declined | None = None) -> Native:
    """Load the library at `path`, linked to the OpenMP that torch has loaded. Raises OSError."""
    library = ctypes.CDLL(str(path))

    def function(name: str, result: Any, *arguments: object) -> Callable[..., Any]:
        try:
            entry = getattr(library, name)
        except AttributeError:
            raise OSError(f"{path}: lacks the function {name}") from None
        entry.restype, entry.argtypes = result, arguments
        return entry  # type: ignore[no-any-return]  # ctypes' functions have no static type

    weight, table = ctypes.POINTER(CWeight), ctypes.POINTER(CTableWeight)
    return Native(
        repack=function("packed_repack", None, weight, c_void_p, c_int64, c_int),
        dequantize=function("packed_dequantize", None, weight, c_void_p, c_int32, c_int),
        matmul=function("packed_matmul", c_int, weight, c_void_p, c_int32, c_int64, c_void_p, c_int),
        dense=function(
            "dense_matmul", c_int, c_int32, c_void_p, *[c_int64] * 2, c_void_p, c_int64, c_void_p, *[c_int] * 2
        ),
        attend=function("attend", c_int, ctypes.POINTER(CAttention), c_int),
        attend_latent=function("attend_latent", c_int, c_void_p, c_int),
        head_product=function("head_product", c_int, c_void_p, c_int),
        pack_int4=function("pack_int4", c_int, c_void_p, c_int32, c_int64, c_int64, c_void_p, c_void_p, c_int),
        best=function("best", None, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int),
        softmax_draw=function("draw", c_int64, c_void_p, c_int64, c_double, c_void_p),
        norm=function("norm", None, ctypes.POINTER(CNorm), c_int),
        gate=function("gate", None, c_int32, c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int),
        weigh=function("weigh", None, c_int32, c_void_p, c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int),
        rotate=function("rotate", None, c_int32, ctypes.POINTER(CRotateTask), c_int),
        run_parts=function("run_parts", c_int, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int),
        run_head=function("run_head", c_int, c_void_p, c_int64, c_void_p, c_void_p, c_int),
        run_passes=function("run_passes", c_int, c_void_p, c_int64, *[c_void_p] * 3, c_int64, *[c_void_p] * 2, c_int),
        convolve=function("convolve", None, c_void_p, c_void_p, c_int),
        delta=function("delta_rule", None, c_void_p, c_void_p, c_int),
        gated_norm=function("gated_norm", None, c_void_p, c_int32, c_int),
        scan=function("state_scan", None, c_void_p, c_void_p, c_int),
        group_norm=function("group_norm", None, c_void_p, c_int32, c_int),
        read=function("read_memory", c_int64, c_void_p, c_int64, c_int),
        table_matmul=function("table_matmul", None, table, c_void_p, c_int64, c_void_p, c_int),
        table_dequantize=function("table_dequantize", None, table, c_int64, c_int64, c_void_p, c_int32, c_int),
        round_weight=function("round_weight", c_int, ctypes.POINTER(CRounding), c_int),
        pack_codes=function("pack_codes", None, c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int64, c_int),
        solve_columns=function("solve_columns", None, ctypes.POINTER(CColumns), c_int),
        rounded_matmul=function(
            "rounded_matmul", c_int, c_void_p, *[c_int64] * 2, c_void_p, c_int64, c_void_p, *[c_int] * 2
        ),
        rounded_outer=function("rounded_outer", c_int, *[c_void_p, c_int64] * 2, c_int64, c_void_p, c_int64, c_int),
        rounds=bool(function("rounded_products", c_int)()),
        experts_matmul=function("experts_matmul", c_int, c_void_p, c_int),
        experts_route=function("experts_route", c_int64, c_void_p, c_int),
        experts_sum=function("experts_sum", None, c_void_p, c_int),
        isa=function("packed_isa", c_char_p)().decode(),
        path=path,
        compiled=compiled,
    )


def _processor() -> str:
    # The lines by which -march=native chooses instructions.
    with open("/proc/cpuinfo") as info:
        lines = info.read().splitlines()
    return "\n".join(
        sorted({line for line in lines if re.match(r"(flags|Features|model|CPU (part|implementer))", line)})
    )


@dataclass(frozen=True)
class _Recipe:
    compiler: str
    flags: tuple[str, ...]
    openmp: str
    sources: Mapping[str, bytes]
    name: str


def _recipe(extra_flags: tuple[str, ...]) -> _Recipe:
    if platform.system() != "Linux":
        raise BuildError(Declined("compiles-on-linux-only", {"system": platform.system()}))
    compiler, version = find_compiler()
    openmp, sources, flags = torch_openmp(), read_sources(), (*FLAGS, THIS_MACHINE, *extra_flags)
    key = digest(sources, version, _processor(), torch.__version__, openmp, *flags)
    return _Recipe(compiler, flags, openmp, sources, f"packed_cpu-{key}.so")


def compile_library(folder: Path, extra_flags: Sequence[str] = ()) -> Path:
    """Compile the library for this machine into `folder` unless a sound one is there; return its path.

    A folder that other users can write to is made private. Raises BuildError, also for a folder of another user.
    """
    recipe = _recipe(tuple(extra_flags))
    target = folder / recipe.name
    try:
        if _cache_problem(target):
            _compile(recipe, folder, target)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise BuildError(no_space(folder)) from None
        reason = error.strerror or str(error)
        raise BuildError(Declined("unwritable-library-folder", {"folder": str(folder), "error": reason})) from None
    return target


def _compile(recipe: _Recipe, folder: Path, target: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(PermissionError):  # another user's folder, which is refused next
        folder.chmod(0o700)
    if problem := folder_problem(folder):
        raise BuildError(Declined("untrusted-library-folder", {"folder": str(folder), "problem": problem}))
    # Linking with -fopenmp would load the system's OpenMP in addition to torch's.
    link = ("-Wl,-z,defs", recipe.openmp)
    compile_sources(recipe.compiler, recipe.sources, recipe.flags, link, target, sealed=True)


def _cache_problem(target: Path) -> str:
    # Why the library must be compiled; "" if the one at `target` can be loaded.
    try:
        return folder_problem(target.parent) or library_problem(target)
    except FileNotFoundError:
        return "is missing"


def cache_folder() -> Path:
    """Return the folder of compiled libraries: `mycli/kernels` under $XDG_CACHE_HOME, by default ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "mycli" / "kernels"


def _choose() -> tuple[Path | Declined, tuple[str, ...]]:
    # The prebuilt library, or why there is none, and the flags to compile one with.
    processor = cpu()
    requested = isa.requested_set(processor.flags)
    return prebuilt.find(isa.portable_name(requested, processor)), isa.compiler_flags(requested, processor)


@cache  # asking the compiler for its version takes longer than a product
def native() -> Native | Declined:
    """Return the library for this machine, or why there is none. Raises UsageError for a bad $MYCLI_CPU_ISA."""
    carried, flags = _choose()
    if isinstance(carried, Path):
        try:
            prebuilt.show_openmp()
            return load_library(carried)
        except (BuildError, OSError) as error:
            carried = _declined(error)
    try:
        return load_library(compile_library(cache_folder(), flags), carried)
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        return Declined("no-native-library", {"compile": _declined(error), "prebuilt": carried})


def _declined(error: Exception) -> Declined:
    return error.declined if isinstance(error, BuildError) else Declined("system-error", {"error": str(error)})


def build_reason() -> str:
    """Return why the first call of `native` compiles, which takes most of a minute; "" if it does not.

    Raises UsageError.
    """
    carried, flags = _choose()
    if isinstance(carried, Path):
        return ""
    try:
        target = cache_folder() / _recipe(flags).name
        problem = _cache_problem(target)
        return problem if problem in ("", "is missing") else f"{target} {problem}"
    except (BuildError, OSError, subprocess.SubprocessError):
        return ""  # `native` returns the reason
