"""The native code of this machine, and as other machines compile it."""

from functools import cache
from pathlib import Path

import pytest

from mycli.runtime.device.system import cpu
from mycli.runtime.kernels.cpu import build, isa
from mycli.runtime.kernels.cpu.build import Native, compile_library, load_library

# Every set of instructions, and what no set has: dense products as AMD's processors have them, and plain vectors.
VARIANTS = ("native", *isa.SETS, "bf16-dots", "plain")


def _flags(variant: str) -> tuple[str, ...]:
    """Of the compiler. -O1: others are tested for their results, not their speed. Skips what this machine has not."""
    flags = cpu().flags
    if variant == "plain":
        return "-march=x86-64", "-O1"
    name = "avx512vnni" if variant == "bf16-dots" else variant
    if not isa.SETS[name].on(flags) or (variant == "bf16-dots" and "avx512_bf16" not in flags):
        pytest.skip(f"this machine has no {variant}")
    return *isa.SETS[name].compiler_flags(flags), *(["-DBF16_DOT=1"] if variant == "bf16-dots" else []), "-O1"


@cache
def _compiled(folder: Path, variant: str) -> Native:
    return load_library(compile_library(folder, _flags(variant)))


@pytest.fixture(params=VARIANTS)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Native:
    """One of them, in place of this machine's for the time of a test; skipped without a compiler."""
    found = build.native()
    if isinstance(found, str):
        pytest.skip(f"no native code here: {found}")
    if request.param in ("native", found.isa):  # the same twice
        return found if request.param == "native" else pytest.skip("that is this machine's own")
    folder = request.config.cache.mkdir("packed_cpu")  # type: ignore[union-attr]  # the plugin is always there
    variant = _compiled(folder, request.param)
    monkeypatch.setattr(build, "native", lambda: variant)
    return variant
