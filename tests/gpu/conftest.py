"""Fresh random numbers for every test on a GPU, and NaN in memory that nobody wrote."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed is printed where a test fails; set beforehand, it repeats the numbers."""
    seed = os.environ.get("MYCLI_TEST_SEED") or str(int.from_bytes(os.urandom(6)))
    print(f"MYCLI_TEST_SEED={seed}")
    monkeypatch.setenv("MYCLI_TEST_SEED", seed)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Deterministic torch fills what it hands out; the fills stand between launches, so that none of them overlap.

    MYCLI_TEST_POISON=0 leaves memory as it comes.
    """
    torch.use_deterministic_algorithms(os.environ.get("MYCLI_TEST_POISON") != "0", warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
