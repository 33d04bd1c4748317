"""Test `--adapter` on each command that takes it: replies change, exports contain the adapter, errors explain."""

import json
from pathlib import Path

import pytest
import torch

from tests.support.adapters import tensors_for, write_adapter
from tests.support.command_line import Mycli
from tests.support.paths import PICO

MODULES = [f"model.layers.{layer}.mlp.{part}_proj" for layer in range(6) for part in ("gate", "up", "down")]
ASK = ("What is the capital of Japan?", "-t", "0", "-n", "12", "--device", "cpu")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Create an adapter large enough to change a reply and small enough to keep it coherent."""
    return write_adapter(tmp_path / "tuned", tensors_for(PICO, *MODULES), base_model_name_or_path="org/pico")


def test_it_changes_a_reply_as_its_merged_copy_does(mycli: Mycli, adapter: Path, tmp_path: Path) -> None:
    plain = mycli("run", "pico", *ASK)
    tuned = mycli("run", "pico", *ASK, "--adapter", str(adapter))
    assert tuned.returncode == 0 and tuned.stderr == "" and tuned.stdout != plain.stdout
    exported = mycli("export", "pico", "--to", "safetensors", "-o", str(tmp_path / "whole"), "--adapter", str(adapter))
    assert exported.returncode == 0, exported.stderr
    assert mycli("run", str(tmp_path / "whole"), *ASK).stdout == tuned.stdout
    against = mycli(
        "eval", "pico", "--adapter", str(adapter), "--ref", str(tmp_path / "whole"), "--tokens", "512", "--json"
    )
    assert json.loads(against.stdout)["divergence"]["kl"]["value"] == pytest.approx(0, abs=1e-9)
    short = ("eval", "pico", "--adapter", str(adapter), "--ref", "pico", "--tokens", "64", "--ctx", "32")
    assert mycli(*short).stdout.startswith("pico with tuned compared with pico\n")


@pytest.mark.usefixtures("short_calibration_text")
def test_a_packed_copy_contains_and_records_it(mycli: Mycli, adapter: Path) -> None:
    made = mycli("quantize", "pico", "--method", "rtn", "--report", "none", "--adapter", str(adapter), "--json")
    folder = Path(json.loads(made.stdout)["folder"])
    assert folder.name == "pico-tuned-rtn-int4-g128"
    source = json.loads((folder / "mycli.json").read_text())["source"]
    assert source["adapter"] == "tuned" and "adapter_model.safetensors" in source["files"]
    assert "quantized from pico with the adapter tuned" in mycli("show", folder.name).stdout
    plain = mycli("quantize", "pico", "--method", "rtn", "--report", "none", "--json")
    written = [Path(json.loads(done.stdout)["folder"], "model.safetensors").read_bytes() for done in (made, plain)]
    assert written[0] != written[1]


def test_estimate_says_what_it_adds(mycli: Mycli, adapter: Path) -> None:
    plain = json.loads(mycli("estimate", "pico", "--device", "cpu", "--json").stdout)
    found = json.loads(mycli("estimate", "pico", "--device", "cpu", "--adapter", str(adapter), "--json").stdout)
    assert found["bytes"]["total"] == plain["bytes"]["total"] and "adapter" not in plain
    nbytes = sum(tensor.nbytes for tensor in tensors_for(PICO, *MODULES).values())
    assert found["adapter"] == {"merged": len(MODULES), "bytes": 0, "file_bytes": nbytes}


def test_estimate_counts_whole_tensors_of_an_adapter_as_merged(mycli: Mycli, tmp_path: Path) -> None:
    norm = {"base_model.model.model.norm.weight": torch.ones(256)}
    trained = write_adapter(tmp_path / "trained", {**tensors_for(PICO, *MODULES[:3]), **norm})
    found = json.loads(mycli("estimate", "pico", "--device", "cpu", "--adapter", str(trained), "--json").stdout)
    assert found["adapter"]["merged"] == 4


@pytest.mark.usefixtures("short_calibration_text")
def test_a_packed_model_is_adapted_and_not_written_again(mycli: Mycli, adapter: Path, tmp_path: Path) -> None:
    folder = json.loads(mycli("quantize", "pico", "--method", "rtn", "--report", "none", "--json").stdout)["folder"]
    plain, tuned = mycli("run", folder, *ASK), mycli("run", folder, *ASK, "--adapter", str(adapter))
    assert tuned.returncode == 0 and tuned.stdout != plain.stdout
    size = json.loads(mycli("estimate", folder, "--adapter", str(adapter), "--json", "--device", "cpu").stdout)[
        "adapter"
    ]
    assert size["merged"] == 0 and size["bytes"] == size["file_bytes"] / 2  # fp32 in the file
    assert "next to packed weights" in mycli("estimate", folder, "--adapter", str(adapter)).stdout
    merged = mycli("export", folder, "--to", "safetensors", "-o", str(tmp_path / "x"), "--adapter", str(adapter))
    assert merged.returncode == 3 and "the weights are quantized (int4-g128)" in merged.stderr
    assert "quantize MODEL --adapter" in merged.stderr and not (tmp_path / "x").exists()


def test_mistakes_are_told(mycli: Mycli, adapter: Path) -> None:
    alone = mycli("run", str(adapter), *ASK)
    assert alone.returncode == 3 and f"hint: mycli run org/pico --adapter {adapter}" in alone.stderr
    other = mycli("run", "pico-draft", *ASK, "--adapter", str(adapter))
    assert other.returncode == 3 and "of rank 4 do not fit" in other.stderr
    foreign = write_adapter(adapter.with_name("foreign"), tensors_for(PICO, MODULES[0]), base_model_name_or_path="a/b")
    assert "was trained on a/b" in mycli("run", "pico", *ASK, "--adapter", str(foreign)).stderr
