"""The native code of this machine, and as other machines compile it."""

from functools import cache
from pathlib import Path

import pytest

from mycli.runtime.kernels.cpu import build
from mycli.runtime.kernels.cpu.build import Native, compile_library, load_library

# What other machines compile, by what is left out here. -O1: they are tested for their results, not their speed.
VARIANTS = {
    "native": (),
    "avx512-without-amx": ("-mno-amx-tile", "-O1"),
    "avx2": ("-mno-avx512f", "-mno-avxvnni", "-O1"),
    "plain": ("-march=x86-64", "-O1"),
}


@cache
def _compiled(folder: Path, variant: str) -> Native:
    return load_library(compile_library(folder, VARIANTS[variant]))


@pytest.fixture(params=VARIANTS)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Native:
    """One of them, in place of this machine's for the time of a test; skipped without a compiler."""
    found = build.native()
    if isinstance(found, str):
        pytest.skip(f"no native code here: {found}")
    if request.param == "native":
        return found
    if request.param != "plain" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the flags of this variant are for machines with AVX-512")
    folder = request.config.cache.mkdir("packed_cpu")  # type: ignore[union-attr]  # the plugin is always there
    variant = _compiled(folder, request.param)
    monkeypatch.setattr(build, "native", lambda: variant)
    return variant
