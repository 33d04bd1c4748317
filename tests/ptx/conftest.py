"""Set the cache of compiled kernels for these tests."""

import pytest

from mycli.runtime.kernels.cpu.library.build import cache_folder

# Triton names its entries by everything that a compiled kernel depends on, its own version included, so that only
# kernels that changed are compiled again. It stands next to the native code of the tests, apart from the user's.
FOLDER = cache_folder().with_name("triton-of-tests")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a cache folder for tests instead of the one in the home folder."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(FOLDER))
