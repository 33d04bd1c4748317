"""Test that a model folder is opened once and reports the contents of its files."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mycli.runtime.checkpoint import model_folder
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import ModelError
from tests.support.engines import whole
from tests.support.families import CASES, make
from tests.support.forked import ForkedProcess
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
    command, pipe = [sys.executable, "-c", WATCHED, *words], subprocess.PIPE
    with ForkedProcess(command, env=environment, stdout=subprocess.DEVNULL, stderr=pipe, text=True) as process:
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 0 and sorted(errors.split()) == folders


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


@pytest.mark.parametrize("shards", [False, True], ids=["one-file", "shards"])
@pytest.mark.parametrize("case", ["other", "equal"])
def test_a_stored_head_that_differs_is_used_though_config_ties_it(case: str, shards: bool, tmp_path: Path) -> None:
    """Fine-tuned folders have one with the old config; transformers 5 reads them so too."""
    make(tmp_path, *CASES["llama-gqa4:2-hd16"])
    raw = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(tmp_path / "model.safetensors")
    if case == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    (tmp_path / "model.safetensors").unlink()
    head = {"lm_head.weight": tensors.pop("lm_head.weight")} if shards else {}
    save_file(tensors, tmp_path / ("first.safetensors" if shards else "model.safetensors"), {"format": "pt"})
    if shards:
        save_file(head, tmp_path / "second.safetensors", {"format": "pt"})
        places = dict.fromkeys(tensors, "first.safetensors") | dict.fromkeys(head, "second.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    folder = open_model_folder(tmp_path)
    assert folder.config.tie_embeddings == folder.raw.values["tie_word_embeddings"] == (case == "equal")
    warnings: list[str] = []
    model = load_model(
        folder, Placement(torch.device("cpu"), torch.float32), warn=lambda text: warnings.append(str(text))
    )
    assert [text.partition(" differs")[0] for text in warnings] == (["lm_head.weight"] if case == "other" else [])
    tokens = torch.arange(12).view(1, 12)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = reference(tokens).logits
    assert (whole(model.model, tokens) - expected).abs().max() <= 2e-5 * expected.abs().max()
