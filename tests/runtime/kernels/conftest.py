"""The native code of this machine, and as other machines compile it."""

import pytest

from mycli.runtime.kernels.cpu.library.build import Native
from tests.support.grids import chosen
from tests.support.native_code import QUICK, VARIANTS, VECTORS, instruction_set


@pytest.fixture(params=chosen(VARIANTS, QUICK))
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Native:
    """Each set of instructions, for products."""
    return instruction_set(request.param, monkeypatch)


@pytest.fixture(params=chosen(VECTORS, QUICK[:2]))
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Native:
    """Each width of vectors, for what multiplies no integers."""
    return instruction_set(request.param, monkeypatch)
