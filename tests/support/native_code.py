"""The native code as other machines compile it, in place of this machine's for the time of a test."""

from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

from mycli.runtime.device.system import cpu
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build, isa
from mycli.runtime.kernels.cpu.library.build import Native, cache_folder, compile_library, load_library

# The first of two sets in plain code, on a machine that has the second alone.
_EMULATED = {"emulated-amx": ("amx", "avx512vnni"), "emulated-avxvnni": ("avxvnni", "avx2")}
# Every set of instructions, and what no set has: dense products as AMD's processors have them, and plain vectors.
VARIANTS = ("native", *isa.SETS, "bf16-dots", "plain", *_EMULATED)
# Only products have instructions for integers: of the rest, sets of equally wide vectors have one code.
VECTORS = ("native", "avx512", "avx2", "plain")
# What the default run compiles beside this machine's own, a quarter of a minute each: the oldest set, and the one that
# most processors have. `make test-all` compiles them all.
QUICK = ("native", "avx2", "avx512vnni")
# Kept beside the libraries of replies: another checkout with the same sources need not compile them again.
FOLDER = cache_folder().with_name("kernels-of-tests")


def _flags(variant: str) -> tuple[str, ...]:
    """Of the compiler. -O1: others are tested for their results, not their speed. Skips what this machine has not."""
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
    """What is compiled in place of instructions; its digest is there so that another text is compiled again."""
    header = Path(__file__).with_name(f"{variant.replace('-', '_')}.h")
    return ["-include", str(header), f"-DSTAND_IN={sha256(header.read_bytes()).hexdigest()}"]


@cache
def _compiled(variant: str) -> Native:
    return load_library(compile_library(FOLDER, _flags(variant)))


def instruction_set(variant: str, monkeypatch: pytest.MonkeyPatch) -> Native:
    """That one of `VARIANTS`, in place of this machine's for the time of a test; skipped without a compiler."""
    found = build.native()
    if isinstance(found, Declined):
        pytest.skip(f"no native code here: {found}")
    if variant in ("native", found.isa):  # the same twice
        return found if variant == "native" else pytest.skip("that is this machine's own")
    compiled = _compiled(variant)
    monkeypatch.setattr(build, "native", lambda: compiled)
    return compiled
