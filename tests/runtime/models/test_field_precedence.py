"""Test fields of config.json that are null, given twice or written in two ways: transformers' reading counts."""

from copy import deepcopy
from typing import Any

import pytest
from transformers import AutoConfig

from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 3,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EPSILONS = {
    **dict.fromkeys(("phi", "stablelm", "cohere", "cohere2", "jais2"), "layer_norm_eps"),
    **dict.fromkeys(("nemotron", "lfm2", "lfm3"), "norm_eps"),
    **dict.fromkeys(("mamba", "mamba2", "nemotron_h"), "layer_norm_epsilon"),
    "starcoder2": "norm_epsilon",
}
NEEDED: dict[str, dict[str, Any]] = {
    "phi": {"partial_rotary_factor": 0.5},
    "stablelm": {"partial_rotary_factor": 0.5},
    "lfm2": {"layer_types": ["conv"] * 4},
    "nemotron_h": {"hybrid_override_pattern": "M*-M", "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
}


def parse(model_type: str, **changes: Any) -> ModelConfig:
    values = {"model_type": model_type, **SHAPE, **NEEDED.get(model_type, {}), **changes}
    return parse_config(Fields({key: value for key, value in values.items() if value != "absent"}, "config.json"))


@pytest.mark.parametrize("section", [YARN, LLAMA3], ids=["yarn", "llama3"])
@pytest.mark.parametrize("inside", [None, 96], ids=["only", "and-in-section"])
def test_the_trained_context_beside_the_section_counts_first(section: dict[str, Any], inside: int | None) -> None:
    inner = {} if inside is None else {"original_max_position_embeddings": inside}
    raw = {"rope_theta": 10000.0, "rope_parameters": {**section, **inner, "rope_theta": 10000.0}}
    raw["original_max_position_embeddings"] = 32
    theirs = AutoConfig.for_model("llama", **SHAPE, **deepcopy(raw))
    theirs.standardize_rope_params()  # as the model does
    context = theirs.rope_parameters["original_max_position_embeddings"]
    assert parse("llama", **raw).rope_scaling.original_context == context == 32
    del raw["original_max_position_embeddings"]
    assert parse("llama", **raw).rope_scaling.original_context == (inside or 128)


def test_a_theta_of_1_has_no_logarithm_for_yarn() -> None:
    with pytest.raises(ModelError, match="rope_theta must not be 1 with yarn"):
        parse("llama", rope_theta=1.0, rope_scaling=YARN)
    assert parse("llama", rope_theta=1.0).rope_theta == 1.0


def test_a_share_of_a_head_that_rotates_is_even() -> None:
    with pytest.raises(ModelError, match="partial_rotary_factor rotates 5 of 16 values of a head"):
        parse("stablelm", partial_rotary_factor=0.34)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("window", "expected"), [(None, None), (64, 64), ("absent", 4096)])
def test_a_window_may_be_null(model_type: str, window: int | str | None, expected: int | None) -> None:
    config = parse(model_type, use_sliding_window=True, sliding_window=window, max_window_layers=0)
    assert {layer.attention.window for layer in config.layer_specs} == {expected}


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 16}], ids=["alone", "and-sliding_window"])
def test_the_published_window_of_mimo_is_one_longer(changes: dict[str, Any]) -> None:
    raw = {"v_head_dim": 16, "sliding_window_size": 16, **changes}
    config = parse("mimo_v2_flash", head_dim=24, partial_rotary_factor=0.34, attention_chunk_size=16, **raw)
    theirs = AutoConfig.for_model("mimo_v2_flash", **SHAPE, **raw)
    assert config.layer(1).attention.window == theirs.sliding_window == 17


def test_layers_of_gemma4_have_keys_of_one_width_when_saved() -> None:
    shape = {**SHAPE, "num_hidden_layers": 12, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0}
    theirs = AutoConfig.for_model("gemma4_text", **shape)
    saved = theirs.to_diff_dict()
    assert "05" in saved["per_layer_config"]
    config = parse_config(Fields(saved, "config.json"))
    assert {layer.attention.head_dim for layer in config.layer_specs if layer.attention.window is None} == {32}
    for sections, message in (({"all": {}}, "something else than layers"), ({"5": {}, "05": {}}, "a layer twice")):
        with pytest.raises(ModelError, match=message):
            parse_config(Fields({**saved, "per_layer_config": sections}, "config.json"))


@pytest.mark.parametrize("model_type", EPSILONS)
def test_an_epsilon_is_read_under_the_familys_name(model_type: str) -> None:
    key = EPSILONS[model_type]
    assert parse(model_type, **{key: 1e-3}).rms_norm_eps == 1e-3
    assert parse(model_type, **{key: 1e-3, "rms_norm_eps": 1e-3}).rms_norm_eps == 1e-3
    assert parse(model_type).rms_norm_eps == 1e-5
    assert parse(model_type, rms_norm_eps=1e-4).rms_norm_eps == 1e-4, "as GGUF files are read"
    with pytest.raises(ModelError, match="differs from"):
        parse(model_type, **{key: 1e-3, "rms_norm_eps": 1e-6})


@pytest.mark.parametrize("size", [None, "absent"])
def test_the_mlp_of_falcon_is_four_times_as_wide(size: str | None) -> None:
    config = parse("falcon", ffn_hidden_size=size, intermediate_size="absent", multi_query=True, parallel_attn=True)
    assert config.layer(0).dense_mlp.down.in_features == 4 * 64
