"""A cache of compiled kernels for this run of the tests."""

import os

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left in the home folder, nothing comes from it; the processes of one run share what they compile."""
    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    monkeypatch.setenv("TRITON_CACHE_DIR", str(run / "triton"))
