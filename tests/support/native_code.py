"""Replaces the native code by builds for other instruction sets for the duration of a test."""

from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

from mycli.runtime.device.system import cpu
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build, isa
from mycli.runtime.kernels.cpu.library.build import Native, cache_folder, compile_library, load_library

# Emulates the first set in plain code on a machine that supports only the second.
_EMULATED = {"emulated-amx": ("amx", "avx512vnni"), "emulated-avxvnni": ("avxvnni", "avx2")}
# Every instruction set, and two builds without one: dense bf16 products as on AMD processors, and plain vectors.
VARIANTS = ("native", *isa.SETS, "bf16-dots", "plain", *_EMULATED)
# Only products use integer instructions; the rest is identical for sets with equal vector width.
VECTORS = ("native", "avx512", "avx2", "plain")
# The default run compiles these besides this machine's set, a quarter of a minute each: the oldest set, and the most
# common one. `make test-all` compiles all.
QUICK = ("native", "avx2", "avx512vnni")
# Next to the library cache of the product: another checkout with the same sources need not compile them again.
FOLDER = cache_folder().with_name("kernels-of-tests")


def _flags(variant: str) -> tuple[str, ...]:
    """Return the compiler flags, -O1 since only results are tested; skip if this machine lacks the set."""
    flags = cpu().flags
    if variant == "plain":
        return "-march=x86-64", "-O1"
    real, name = _EMULATED.get(variant, ("", "avx512vnni" if variant == "bf16-dots" else variant))
    if not isa.SETS[name].on(flags) or (variant == "bf16-dots" and "avx512_bf16" not in flags):
        pytest.skip(f"this machine has no {variant}")
    if real and isa.SETS[real].on(flags):
        pytest.skip(f"this machine has {real}")
    beside = _stand_in(variant) if real else ["-DBF16_DOT=1"] * (variant == "bf16-dots")
    return *isa.SETS[name].compiler_flags(flags), *beside, "-O1"


def _stand_in(variant: str) -> list[str]:
    """Return the flags that replace instructions by a header; the digest forces recompilation when it changes."""
    header = Path(__file__).with_name(f"{variant.replace('-', '_')}.h")
    return ["-include", str(header), f"-DSTAND_IN={sha256(header.read_bytes()).hexdigest()}"]


@cache
def compiled(variant: str) -> Native:
    """Return the build `variant` of `VARIANTS`; skip if this machine lacks it."""
    return load_library(compile_library(FOLDER, _flags(variant)))


def instruction_set(variant: str, monkeypatch: pytest.MonkeyPatch) -> Native:
    """Use the build `variant` of `VARIANTS` for the duration of a test; skip without a compiler."""
    found = build.native()
    if isinstance(found, Declined):
        pytest.skip(f"no native code here: {found}")
    if variant in ("native", found.isa):  # would test the same build twice
        return found if variant == "native" else pytest.skip("that is this machine's own")
    library = compiled(variant)
    monkeypatch.setattr(build, "native", lambda: library)
    return library
