"""Check names, pulls by ranges and other programs' stores with changes of a few seeds; `fuzz_pulls` runs longer."""

from collections.abc import Iterator

import pytest

from mycli.runtime.hub import download, other_stores, remote_file
from tests.attacks import fuzz_pulls
from tests.attacks.fuzz_pulls import Place, WrongOutcomeError, attempt

SEEDS = {"names": 25, "ranges": 4, "stores": 25}


@pytest.fixture(scope="module")
def where() -> Iterator[Place]:
    with fuzz_pulls.place() as made:
        yield made


@pytest.mark.parametrize("name", SEEDS)
def test_each_case_ends_well(name: str, where: Place) -> None:
    assert len({attempt(name, seed, where) for seed in range(SEEDS[name])}) > 1


def _wrong(name: str, where: Place, seeds: int) -> bool:
    try:
        for seed in range(seeds):
            attempt(name, seed, where)
    except WrongOutcomeError:
        return True
    return False


@pytest.mark.slow
def test_planted_faults_are_found(where: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quant of another name, a range of other bytes, and a blob that is a link are each an outcome that is wrong."""
    fetch = remote_file.fetch_range

    def other_bytes(*arguments: object) -> None:
        fetch(*arguments)  # type: ignore[arg-type]
        view = arguments[-1]
        assert isinstance(view, memoryview)
        view[-1] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(download, "choose_quant", lambda names, quant: min(names))
        assert _wrong("names", where, 60)
    with monkeypatch.context() as patch:
        patch.setattr(remote_file, "fetch_range", other_bytes)
        assert _wrong("ranges", where, 6)
    with monkeypatch.context() as patch:
        patch.setattr(other_stores, "find_stored", lambda model: None)
        assert _wrong("stores", where, 20)
