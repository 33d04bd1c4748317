"""Test the words of `mycli show` for models whose layers differ."""

import json
import re
from pathlib import Path

import pytest

from mycli.cli.commands.show import _heads, _mlp
from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.command_line import Mycli
from tests.support.families import CASES, reference_config
from tests.support.models import random_model
from tests.support.paths import PICO
from tests.support.stored_models import FIRST, cached, quantized

WORDS = {
    "llama-gqa4:2-hd16": ("4 of 16, 2 for keys and values", "MLP 88"),
    "mamba2-2-groups": ("3 of 3 layers are recurrent", "no MLP"),
    "bamba-2-groups": ("4 of 16, 2 for keys and values in 1 of 3 layers; 2 of 3 layers are recurrent", "MLP 88"),
    "gemma4-ple-shared-kv-double": (
        "4 of 16, 2 for keys and values in 3 of 6 layers; 4 of 32, 2 for keys and values in 3 of 6 layers; "
        "3 of 6 layers share the KV cache of another",
        "MLP 88",
    ),
    "nemotron_h-every-kind": (
        "4 of 32, 2 for keys and values in 1 of 5 layers; 2 of 5 layers are recurrent",
        "8 experts of 32 in 1 of 5 layers, 3 per token",
    ),
    "nemotron_h-no-experts": (
        "4 of 32, 2 for keys and values in 1 of 5 layers; 2 of 5 layers are recurrent",
        "MLP 88",
    ),
    "qwen3_moe-8top2": ("4 of 16, 2 for keys and values", "8 experts of 96, 2 per token"),
    "lfm2_moe-8top3-tied": (
        "4 of 16, 2 for keys and values in 1 of 4 layers; 3 of 4 layers are recurrent",
        "8 experts of 32 in 2 of 4 layers, 3 per token",
    ),
}


@pytest.mark.parametrize("case", WORDS)
def test_heads_and_mlps_are_counted_by_layer(case: str) -> None:
    config = parse_config(Fields(reference_config(*CASES[case]).to_dict(), "config.json"))
    assert (_heads(config), _mlp(config)) == WORDS[case]


def test_windows_rope_sampling_and_template_are_shown(mycli: Mycli, tmp_path: Path) -> None:
    """The text names the smallest window; what a model does not set is left out."""
    rope = {"rope_type": "linear", "factor": 2.5}
    folder = random_model(tmp_path / "m", model_type="mistral", sliding_window=24, rope_scaling=rope)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "do_sample": True}))
    answer, text = json.loads(mycli("show", str(folder), "--json").stdout), mycli("show", str(folder)).stdout
    assert answer["sliding_windows"] == [24] and answer["chat_template"] is True and answer["task"] == "generative"
    assert answer["bits_per_weight"] == 16 and answer["quantized_linears"] == 0
    assert answer["sampling"]["temperature"] == 0.5 and None not in answer["sampling"].values()
    assert re.search(r"context +\d+ tokens, linear rope x 2\.5, sliding window 24\n", text)
    assert re.search(r"sampling .*temperature 0\.5", text) and "task" not in text and "adapter" not in text
    plain = random_model(tmp_path / "plain")
    (plain / "tokenizer_config.json").write_text("{}")
    answer, text = json.loads(mycli("show", str(plain), "--json").stdout), mycli("show", str(plain)).stdout
    assert (answer["sliding_windows"], answer["chat_template"]) == ([], False)
    assert re.search(r"context +\d+ tokens\n", text) and re.search(r"chat template +no\n", text)


def test_a_recipe_is_shown_without_what_was_not_set(mycli: Mycli, tmp_path: Path) -> None:
    """The text has values that the program chose, but no digests of files and no sections without an entry."""
    folder = random_model(tmp_path / "m")
    record = {
        "recipe": {"method": "gptq", "bits": 4, "head": None, "seq": None},
        "calibration": {"seq": 512},
        "source": {"name": "org/m", "files": {"config.json": "0" * 64}},
    }
    (folder / "mycli.json").write_text(json.dumps(record))
    lines = mycli("show", str(folder), "--recipe").stdout.splitlines()[1:]
    assert [re.split(r" {2,}", line.strip()) for line in lines] == [
        ["recipe method", "gptq"],
        ["recipe bits", "4"],
        ["recipe seq", "512"],
        ["source name", "org/m"],
    ]


@pytest.mark.parametrize(
    ("card", "quality"),
    [
        ({}, None),
        ({"card": {"perplexity": {"value": 3.0}}}, "3.0000"),
        (
            {
                "card": {
                    "perplexity": {"value": 3.0},
                    "divergence": {
                        "kl": {"value": 0.0125},
                        "kl_p99": 0.25,
                        "same_top1": {"value": 0.98765},
                        "reference_perplexity": {"value": 2.5},
                    },
                }
            },
            "2.5000 before, 3.0000 after",
        ),
    ],
    ids=["not-measured", "perplexity", "divergence"],
)
def test_the_quality_is_shown_as_far_as_it_was_measured(
    card: dict[str, object], quality: str | None, mycli: Mycli, tmp_path: Path
) -> None:
    folder = random_model(tmp_path / "m")
    (folder / "mycli.json").write_text(json.dumps({"recipe": {}, "source": {"name": "org/m"}, **card}))
    text = mycli("show", str(folder)).stdout
    found = re.search(r"perplexity +(.+)\n", text)
    assert (found and found[1].strip()) == quality
    assert ("99% below 0.25" in text and "98.77%" in text) == ("divergence" in str(card))


def test_a_name_that_is_none_of_the_hub_is_not_looked_for_there(mycli: Mycli) -> None:
    """The address has no server: a request would end with another error."""
    done = mycli("show", "nothing-here", env={"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:1"})
    assert done.returncode == 4 and "no model of that name here" in done.stderr


@pytest.mark.parametrize(
    ("source", "origin"),
    [
        ({}, "quantized from an unknown model"),
        ({"name": "org/m"}, "quantized from org/m"),
        ({"name": "org/m", "revision": "abc", "scheme": "int8"}, "quantized from org/m @ abc (int8)"),
        ({"name": "org/m", "adapter": "org/lora"}, "quantized from org/m with the adapter org/lora"),
    ],
    ids=["unknown", "name", "revision-and-scheme", "adapter"],
)
def test_a_quantized_model_names_its_origin(
    source: dict[str, str], origin: str, mycli: Mycli, environment: dict[str, str]
) -> None:
    folder = quantized("tiny-int4", Path(environment["XDG_DATA_HOME"]) / "mycli")
    (folder / "mycli.json").write_text(json.dumps({"source": source}))
    text = mycli("show", "tiny-int4").stdout
    assert re.search(rf"origin +{re.escape(origin)}\n", text)


def test_a_model_of_the_hub_names_its_commit(
    mycli: Mycli, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", f"{environment['HF_HOME']}/hub")
    cached({path.name: path.read_bytes() for path in PICO.iterdir()})
    assert re.search(rf"origin +org/tiny @ {FIRST}\n", mycli("show", "org/tiny").stdout)
    assert re.search(r"origin +unknown\n", mycli("show", str(PICO)).stdout)
    answer = json.loads(mycli("show", "org/tiny", "--json").stdout)
    assert (answer["repo"], answer["commit"], answer["recipe"]) == ("org/tiny", FIRST, None)
