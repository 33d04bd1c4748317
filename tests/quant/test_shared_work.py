"""Test that the hashes of a source are computed once for copies that are made together, and again after a failure."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from mycli.quant.output import model_card
from mycli.quant.shared_work import SharedWork
from mycli.runtime.checkpoint.open_folder import open_model_folder
from tests.support.paths import DRAFT


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """The passes over the files of a source so far."""
    begun: list[Path | None] = []
    digests = model_card.digests

    def counted(files: list[Path], root: Path | None = None, *rest: object) -> object:
        begun.append(root)
        return digests(files, root, *rest)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(model_card, "digests", counted)
    return begun


def test_copies_within_and_after_a_group_share_one_pass(passes: list[Path | None]) -> None:
    shared, folder = SharedWork(), open_model_folder(DRAFT)
    with ExitStack() as stack:
        group = [stack.enter_context(shared.digests(folder)) for _ in range(3)]
        assert all(digests.result() == group[0].result() for digests in group)
    with shared.digests(folder) as later:
        assert later.result() == group[0].result()
    assert len(passes) == 1


def test_after_an_interrupted_group_the_source_is_hashed_again(passes: list[Path | None]) -> None:
    shared, folder = SharedWork(), open_model_folder(DRAFT)
    with pytest.raises(KeyboardInterrupt), shared.digests(folder), shared.digests(folder):
        raise KeyboardInterrupt
    with shared.digests(folder) as digests:
        assert "model.safetensors" in digests.result()
    assert len(passes) == 2


def test_known_digests_are_not_computed(passes: list[Path | None]) -> None:
    with SharedWork(digests={"a": {}}).digests(open_model_folder(DRAFT)) as digests:
        assert digests.result() == {"a": {}}
    assert not passes
