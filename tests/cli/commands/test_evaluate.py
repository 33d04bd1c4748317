"""Test `mycli eval --portable-bits`: what it measures, and what it refuses."""

import json
import os
from pathlib import Path

import pytest

from tests.support.command_line import Mycli
from tests.support.native_parts import need_native_code

SHORT = ("pico", "--tokens", "512", "--ctx", "128", "--device", "cpu")


def test_portable_bits_measure_the_passes_of_replies(mycli: Mycli) -> None:
    need_native_code()
    done = mycli("eval", *SHORT, "--dtype", "bf16", "--portable-bits", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and (found["dtype"], found["scored_tokens"]) == ("bfloat16", 4 * 127)
    plain = json.loads(mycli("eval", *SHORT, "--dtype", "bf16", "--json").stdout)
    assert found["perplexity"] == pytest.approx(plain["perplexity"], rel=1e-2)


@pytest.mark.parametrize("words", [("--kv-sweep",), ("--activations-sweep",), ("--dtype", "fp32")])
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
    shown = mycli("eval", "pico", "--kv-sweep", "--tokens", "64", "--ctx", "32", "--device", "cpu").stdout
    sizes = [line.split("|")[2].strip() for line in shown.splitlines()[2:]]
    assert sizes == ["6.00 KiB", "3.00 KiB", "1.59 KiB", "0.84 KiB"]


def test_the_hint_for_a_damaged_reference_names_it(mycli: Mycli, tmp_path: Path) -> None:
    made = json.loads(mycli("quantize", "pico-draft", "--method", "rtn", "--report", "none", "--json").stdout)
    os.truncate(Path(made["folder"]) / "model.safetensors", 100_000)
    name = Path(made["folder"]).name
    refused = mycli("eval", *SHORT, "--ref", name)
    assert refused.returncode == 3 and f"mycli verify {name}" in refused.stderr
