"""Test the columns of `mycli list`: the commit of a cached model, the folder of another program's, and the state."""

import json
from pathlib import Path

import pytest

from tests.support.command_line import Mycli
from tests.support.other_stores import lm_studio
from tests.support.stored_models import FIRST, cached


@pytest.fixture
def stored(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Store a model of the hub that cannot run, and return the file of one of LM Studio's."""
    monkeypatch.setenv("HF_HUB_CACHE", f"{environment['HF_HOME']}/hub")
    cached({"config.json": b"{}", "pytorch_model.bin": b"x"})
    return lm_studio(Path(environment["HOME"]), b"GGUF", "org/made/m.gguf")


def test_a_row_says_where_a_model_is_and_whether_it_can_run(
    stored: Path, mycli: Mycli, environment: dict[str, str]
) -> None:
    lines = mycli("list", env={"COLUMNS": "400"}).stdout.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    rows = {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells if row}
    assert (rows["pico"]["commit"], rows["pico"]["folder"], rows["pico"]["state"]) == ("", "", "ready")
    hub, (other,) = rows["org/tiny"], [row for row in rows.values() if row["kind"] == "lm-studio"]
    assert (hub["commit"], hub["folder"], hub["state"]) == (FIRST[:12], "", "no safetensors")
    assert other["folder"] == str(stored) and other["state"] != "ready"


def test_a_program_reads_what_is_usable(stored: Path, mycli: Mycli) -> None:
    listed = mycli("list", "--json")
    models = {model["name"]: model for model in json.loads(listed.stdout)["models"]}
    assert (models["pico"]["usable"], models["pico"]["problem"], models["pico"]["commit"]) == (True, None, None)
    assert (models["org/tiny"]["usable"], models["org/tiny"]["problem"]) == (False, "no safetensors")
    assert "unfinished" not in listed.stderr and "unfinished" not in mycli("list").stderr


def test_how_to_end_unfinished_work_is_said_once_and_to_people(mycli: Mycli, environment: dict[str, str]) -> None:
    (Path(environment["XDG_DATA_HOME"]) / "mycli" / "models" / ".tiny-int4.work").mkdir(parents=True)
    assert "delete it with mycli rm NAME" in mycli("list").stderr
    assert "mycli rm" not in mycli("list", "--json").stderr
