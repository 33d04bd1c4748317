"""Test the words of `mycli show` for models whose layers differ."""

import pytest

from mycli.cli.commands.show import _heads, _mlp
from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.families import CASES, reference_config

WORDS = {
    "llama-gqa4:2-hd16": ("4 of 16, 2 for keys and values", "MLP 88"),
    "mamba2-2-groups": ("3 of 3 layers are recurrent", "no MLP"),
    "bamba-2-groups": ("4 of 16, 2 for keys and values in 1 of 3 layers; 2 of 3 layers are recurrent", "MLP 88"),
    "gemma4-ple-shared-kv-double": (
        "4 of 16, 2 for keys and values in 3 of 6 layers; 4 of 32, 2 for keys and values in 3 of 6 layers; "
        "3 of 6 layers share the KV cache of another",
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
