"""Set fresh random numbers for every test on a GPU, and NaN in uninitialized memory."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a random seed; a failing test prints it, and MYCLI_TEST_SEED repeats its numbers."""
    seed = os.environ.get("MYCLI_TEST_SEED") or str(int.from_bytes(os.urandom(6)))
    print(f"MYCLI_TEST_SEED={seed}")
    monkeypatch.setenv("MYCLI_TEST_SEED", seed)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill uninitialized memory with NaN by deterministic torch; the fills separate launches, so that none overlap.

    MYCLI_TEST_POISON=0 leaves memory uninitialized.
    """
    torch.use_deterministic_algorithms(os.environ.get("MYCLI_TEST_POISON") != "0", warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
