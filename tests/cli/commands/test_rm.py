"""Test what `mycli rm` asks, deletes and prints."""

import json
from pathlib import Path

import pytest

from mycli.cli.output import Output
from mycli.runtime.utils.units import human_bytes
from tests.support.command_line import Mycli
from tests.support.stored_models import quantized


@pytest.fixture
def models(environment: dict[str, str]) -> list[Path]:
    home = Path(environment["XDG_DATA_HOME"]) / "mycli"
    return [quantized(name, home) for name in ("tiny-int4", "tiny-int8")]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_models_are_deleted_once_and_named_with_their_sizes(models: list[Path], mycli: Mycli) -> None:
    nbytes = size(models[0])
    done = mycli("rm", "tiny-int4", "tiny-int4", "--yes")
    assert (done.returncode, done.stdout) == (0, f"removed tiny-int4: {human_bytes(nbytes)}\n")
    assert [folder.exists() for folder in models] == [False, True]
    answer = json.loads(mycli("rm", "tiny-int8", "--yes", "--json").stdout)
    assert answer["removed"] == [{"name": "tiny-int8", "folder": str(models[1]), "bytes": nbytes}]


def test_nothing_is_deleted_unless_all_names_can_be(models: list[Path], mycli: Mycli) -> None:
    assert mycli("rm", "tiny-int4", "tiny-int4x", "--yes").returncode == 4
    assert all(folder.exists() for folder in models)


def test_without_a_terminal_the_command_that_deletes_is_named(models: list[Path], mycli: Mycli) -> None:
    refused = mycli("rm", "tiny-int4", "tiny-int8")
    assert refused.returncode == 2 and "cannot ask whether to delete tiny-int4, tiny-int8" in refused.stderr
    assert "mycli rm tiny-int4 tiny-int8 --yes" in refused.stderr and all(folder.exists() for folder in models)


@pytest.mark.parametrize(("names", "answer"), [(["tiny-int4"], "y"), (["tiny-int4", "tiny-int8"], "n")])
def test_the_question_names_the_size_and_the_place(
    names: list[str], answer: str, models: list[Path], mycli: Mycli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Output, "interactive", True)
    place = "2 folders" if len(names) == 2 else str(models[0])
    question = f"Delete {', '.join(names)} ({human_bytes(len(names) * size(models[0]))}) from {place}? [y/N] "
    done = mycli("rm", *names, input=f"{answer}\n")
    assert done.returncode == 0 and question in done.stderr
    assert ("nothing was deleted" in done.stderr) == (answer == "n")
    assert [folder.exists() for folder in models] == [answer == "n", True]
