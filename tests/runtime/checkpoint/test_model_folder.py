"""Test that a model folder is opened once and reports the contents of its files."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mycli.runtime.checkpoint import model_folder
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError
from tests.support.paths import PICO

# Prints each folder whose config.json is opened, one per line, during `mycli run`.
WATCHED = """
import os, sys
opened = []
sys.addaudithook(
    lambda event, args: opened.append(args[0])
    if event == "open" and isinstance(args[0], (str, os.PathLike)) and os.path.basename(args[0]) == "config.json"
    else None
)
from mycli.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(*(os.path.basename(os.path.dirname(os.path.realpath(path))) for path in opened), sep="\\n", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("options", "folders"),
    [([], ["pico"]), (["--draft", "pico-draft"], ["pico", "pico-draft"]), (["--json", "--samples", "2"], ["pico"])],
    ids=["plain", "draft", "samples"],
)
def test_a_reply_reads_each_config_once(options: list[str], folders: list[str], environment: dict[str, str]) -> None:
    words = ["run", "pico", "hello", "-n", "2", "-q", "--device", "cpu", *options]
    done = subprocess.run([sys.executable, "-c", WATCHED, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and sorted(done.stderr.split()) == folders


def test_each_file_is_read_when_it_is_wanted_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "pico"
    shutil.copytree(PICO, folder)
    calls: list[str] = []
    read, headers = model_folder.read_generation_config, Manifest.open
    monkeypatch.setattr(model_folder, "read_generation_config", lambda *a: (calls.append("generation"), read(*a))[1])
    monkeypatch.setattr(Manifest, "open", lambda path: (calls.append("manifest"), headers(path))[1])
    opened = open_model_folder(folder)
    assert calls == []
    assert opened.manifest is opened.checked_manifest() and opened.generation is opened.generation
    assert calls == ["manifest", "generation"]
    (folder / "config.json").unlink()
    assert opened.raw.text("model_type") == opened.config.model_type and opened.packings == {}


def test_a_format_that_is_not_read_is_told_when_it_is_wanted(tmp_path: Path) -> None:
    config = json.loads((PICO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "other"}}))
    opened = open_model_folder(tmp_path)
    assert opened.config.layers > 0
    with pytest.raises(ModelError, match="quant_method"):
        _ = opened.packings
