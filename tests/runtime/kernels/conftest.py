"""Provide the native library for this machine and for other instruction sets."""

import pytest

from mycli.runtime.kernels.cpu.library.build import Native
from tests.support.grids import chosen
from tests.support.native_code import QUICK, VARIANTS, VECTORS, instruction_set


@pytest.fixture(params=chosen(VARIANTS, QUICK))
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Native:
    """Return the library for each instruction set, for products."""
    return instruction_set(request.param, monkeypatch)


@pytest.fixture(params=chosen(VECTORS, QUICK[:2]))
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Native:
    """Return the library for each vector width, for kernels without integer products."""
    return instruction_set(request.param, monkeypatch)
