"""Test config.json of every family: refused (B2 to B15) and ignored (B15, B18) fields, and the resulting numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import RopeScaling
from mycli.runtime.models.registry import families, parse_config
from mycli.runtime.utils.json_fields import Fields

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def parse(**changes: Any) -> ModelConfig:
    values = {key: value for key, value in {**LLAMA, **changes}.items() if value != "absent"}
    return parse_config(Fields(values, "config.json"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"B2-no-{key}": ({key: "absent"}, f"{key} is missing")
        for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")
    },
    "B3-zero": ({"hidden_size": 0}, "hidden_size"),
    "B3-negative": ({"num_hidden_layers": -3}, "num_hidden_layers"),
    "B3-float": ({"vocab_size": 100.0}, "vocab_size"),
    "B3-string": ({"intermediate_size": "96"}, "intermediate_size"),
    "B3-bool": ({"num_attention_heads": True}, "num_attention_heads"),
    "B4-dimension-2^31": ({"hidden_size": 1 << 31, "vocab_size": 1 << 31}, "elements"),
    "B4-layers-10^9": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "B5-hidden-not-multiple": ({"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size"),
    "B5-odd-head": ({"head_dim": 15}, "head_dim 15 is odd"),
    "B6-heads-not-multiple": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "B6-more-kv-heads": ({"num_key_value_heads": 8}, "num_key_value_heads"),
    "B6-zero-kv-heads": ({"num_key_value_heads": 0}, "num_key_value_heads"),
    "B7-unknown": ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    "B7-no-factor": ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "B7-factor-zero": ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
    "B7-factor-negative": ({"rope_scaling": {"type": "dynamic", "factor": -2}}, "factor"),
    "B7-factor-string": ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
    "B7-both-keys": (
        {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
        "both given",
    ),
    "B7-llama3-without-bands": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    "B7-llama3-bands-swapped": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}},
        "high_freq_factor",
    ),
    "B7-per-layer-type": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}},
        "layer type",
    ),
    "B8-theta-zero": ({"rope_theta": 0}, "rope_theta"),
    "B8-theta-negative": ({"rope_theta": -1.0}, "rope_theta"),
    "B8-theta-1e400": ({"rope_theta": 10**400}, "rope_theta"),
    "B9-context-zero": ({"max_position_embeddings": 0}, "max_position_embeddings"),
    "B10-softcap": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "B10-partial-rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "B10-experts": ({"num_local_experts": 8}, "num_local_experts"),
    "B10-layer-types": (
        {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["linear_attention"] * 2},
        "linear_attention",
    ),
    "B10-layer-types-count": (
        {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"]},
        "1 entries for 2 layers",
    ),
    "B10-sliding-without-window": ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "layer_types"),
    "B11-activation": ({"hidden_act": "gelu"}, "'gelu' is not supported"),
    "B11-model-type": ({"model_type": "gptj"}, "gptj"),
    "gpt-neo-kinds": (
        {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 5]]},
        "attention_types must give global or local for each of",
    ),
    "gpt-neo-unknown-kind": (
        {"model_type": "gpt_neo", "attention_types": [[["global", "linear"], 1]]},
        "attention_types must give global or local for each of",
    ),
    "gpt-neo-pairs": ({"model_type": "gpt_neo", "attention_types": [["global", "local"]]}, "must hold pairs"),
    "B11-model-type-path": ({"model_type": "../llama"}, "model_type"),
    "B11-model-type-private": ({"model_type": "_common"}, "_common"),
    "tied-null": ({"tie_word_embeddings": None}, "true or false, not null"),
    "B13-dtype": ({"torch_dtype": "float64"}, "float64"),
    "B16-eos-beyond": ({"eos_token_id": 100}, "eos_token_id 100"),
    "B16-eos-string": ({"eos_token_id": "</s>"}, "eos_token_id"),
    "B16-eos-many": ({"eos_token_id": [1] * 10**6}, "eos_token_id"),
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused_by_name(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ModelError, match=message) as caught:
        parse(**changes)
    assert "config.json" in caught.value.message


def test_unknown_family_error_lists_the_known_ones() -> None:
    with pytest.raises(ModelError) as caught:
        parse(model_type="unheard_of")
    assert all(name in caught.value.hint for name in families())


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "trust_remote_code": True},
        {"_name_or_path": "/etc/passwd", "transformers_version": "99", "use_cache": False, "whatever": [1]},
        {"partial_rotary_factor": 1.0, "attn_logit_softcapping": None, "num_local_experts": 0},
    ],
    ids=["B15-remote-code", "B18-unknown-keys", "neutral-values"],
)
def test_ignored(changes: dict[str, Any]) -> None:
    assert parse(**changes) == parse()


def test_defaults_of_absent_fields() -> None:
    config = parse(num_key_value_heads="absent", max_position_embeddings="absent", eos_token_id="absent")
    assert (config.kv_heads, config.head_dim, config.max_context, config.eos) == (4, 16, 2048, ())
    mistral = {"model_type": "mistral", "num_attention_heads": 16, "num_key_value_heads": "absent"}
    assert parse(**mistral, sliding_window=None).kv_heads == 8
    assert parse(model_type="qwen3").head_dim == 128
    assert parse(max_position_embeddings=10**12).max_context == 10**12, "memory bounds it, not the config"


@pytest.mark.parametrize("model_type", ["nemotron_h", "mamba2", "bamba", "granitemoehybrid", "falcon_h1"])
def test_the_endless_time_step_of_published_files(model_type: str, tmp_path: Path) -> None:
    sizes = {"mamba_num_heads": 8, "mamba_n_heads": 8, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1}
    values = {**LLAMA, **sizes, "model_type": model_type, "mamba_d_ssm": 128, "layers_block_type": ["mamba", "mlp"]}
    if model_type != "nemotron_h":
        del values["layers_block_type"]
    files = []
    for name, more in (("absent", {}), ("infinite", {"time_step_limit": [0.0, float("inf")]})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**values, **more}))
        files.append(open_model_folder(tmp_path / name).config)
    assert files[0].layer_specs == files[1].layer_specs


def test_old_and_new_rope_keys_mean_the_same() -> None:
    old = parse(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0})
    new = parse(rope_theta="absent", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5})
    assert old == new and old.rope_scaling == RopeScaling("linear", 4.0, 128)


@pytest.mark.parametrize(
    ("trained", "kind", "factor", "context"),
    [
        (40960, "yarn", 4.0, 131072),  # as Qwen3's card says
        (32768, "yarn", 4.0, 131072),  # Qwen2.5's
        (1000000, "yarn", 3.0, 1000000),  # Qwen3-VL's raises both
        (16384, "linear", 4.0, 16384),  # DeepSeek Coder's, which is scaled already
        (32768, "dynamic", 2.0, 65536),  # whose frequencies change from the trained length on
        (32768, "dynamic", 0.5, 32768),
    ],
)
def test_scaling_added_to_a_config_lengthens_the_context(trained: int, kind: str, factor: float, context: int) -> None:
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": 32768}
    config = parse(max_position_embeddings=trained, rope_theta=1e6, rope_scaling=scaling)
    assert config.max_context == context


def test_windows_by_family() -> None:
    assert parse(model_type="mistral", sliding_window=32).windows == (32, 32)
    assert parse(model_type="mistral", sliding_window=128).windows == (), "as long as the context: no window"
    assert parse(model_type="mistral", max_position_embeddings=8192).windows == (4096, 4096), "transformers' default"
    assert parse(model_type="mistral", max_position_embeddings=8192, sliding_window=None).windows == ()
    qwen = {"model_type": "qwen2", "sliding_window": 32, "max_window_layers": 1}
    assert parse(**qwen).windows == ()
    assert parse(**qwen, use_sliding_window=True).windows == (None, 32)
    mixed = parse(**qwen, use_sliding_window=True, layer_types=["sliding_attention", "full_attention"])
    assert mixed.windows == (32, None)
    assert parse(sliding_window=32).windows == (), "Llama has none"
    sizes = {"num_hidden_layers": 10, "num_kv_shared_layers": 0, "max_position_embeddings": 4096}
    gemma_3n = parse(model_type="gemma3n_text", **sizes)
    assert gemma_3n.windows == ((512,) * 4 + (None,)) * 2
    gpt_neo = parse(model_type="gpt_neo", num_hidden_layers=24, max_position_embeddings=512)
    assert gpt_neo.windows == (None, 256) * 12, "transformers' default"


def test_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert open_model_folder(tmp_path).config == parse()
