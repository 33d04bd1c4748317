"""Set a cache of compiled kernels for this test run."""

import os

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a temporary cache folder instead of the one in the home folder; the processes of one run share it."""
    base = tmp_path_factory.getbasetemp()
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    monkeypatch.setenv("TRITON_CACHE_DIR", str(run / "triton"))
