"""Test `mycli eval --portable-bits`: what it measures, and what it refuses."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.support.command_line import Mycli
from tests.support.native_parts import need_native_code
from tests.support.paths import PICO

SHORT = ("pico", "--tokens", "512", "--ctx", "128", "--device", "cpu")


def test_portable_bits_measure_the_passes_of_replies(mycli: Mycli) -> None:
    need_native_code()
    done = mycli("eval", *SHORT, "--dtype", "bf16", "--portable-bits", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and (found["dtype"], found["scored_tokens"]) == ("bfloat16", 4 * 127)
    plain = json.loads(mycli("eval", *SHORT, "--dtype", "bf16", "--json").stdout)
    assert found["perplexity"] == pytest.approx(plain["perplexity"], rel=1e-2)


@pytest.mark.parametrize(
    "words", [("--dtype", "bf16", "--kv-sweep"), ("--dtype", "bf16", "--activations-sweep"), ("--dtype", "fp32")]
)
def test_portable_bits_are_refused_where_they_mean_nothing(words: tuple[str, ...], mycli: Mycli) -> None:
    done = mycli("eval", *SHORT, "--portable-bits", *words)
    assert done.returncode == 2 and "portable" in done.stderr and "omit" in done.stderr


def test_a_comparison_names_both_models(mycli: Mycli) -> None:
    words = ("eval", "pico-draft", "--ref", "pico", "--tokens", "128", "--ctx", "64", "--device", "cpu")
    found = json.loads(mycli(*words, "--json").stdout)
    assert (found["model"], found["reference"]) == ("pico-draft", "pico") and found["divergence"]["kl"]["value"] > 0.1
    shown = mycli(*words).stdout
    assert shown.startswith("pico-draft compared with pico\n")
    assert f"pico-draft {found['perplexity']['value']:.2f}" in shown


def test_the_bytes_of_a_token_are_a_column(mycli: Mycli) -> None:
    done = mycli("eval", "pico", "--kv-sweep", "--tokens", "64", "--ctx", "32", "--device", "cpu")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    assert [row[1] for row in rows] == ["6.00 KiB", "3.00 KiB", "1.59 KiB", "0.84 KiB"]
    assert rows[0][3:] == [""] * 4 and all(re.fullmatch(r"\d+\.\d\d%", row[-1]) for row in rows[1:])
    assert done.stderr == "2 windows of 32 tokens, compared with float32\n"


def test_models_that_tokenize_the_text_differently_are_not_compared(mycli: Mycli, tmp_path: Path) -> None:
    other = shutil.copytree(PICO, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:100]
    (other / "tokenizer.json").chmod(0o644)
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    done = mycli("eval", *SHORT, "--ref", str(other))
    assert done.returncode == 2 and f"pico and {other} tokenize the text differently" in done.stderr


def test_the_hint_for_a_damaged_reference_names_it(mycli: Mycli, tmp_path: Path) -> None:
    made = json.loads(mycli("quantize", "pico-draft", "--method", "rtn", "--report", "none", "--json").stdout)
    os.truncate(Path(made["folder"]) / "model.safetensors", 100_000)
    name = Path(made["folder"]).name
    refused = mycli("eval", *SHORT, "--ref", name)
    assert refused.returncode == 3 and f"mycli verify {name}" in refused.stderr
