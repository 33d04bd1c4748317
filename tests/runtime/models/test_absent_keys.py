"""Test that a key which a config leaves out has the default of transformers' class, in all families and wrappers."""

import json
import pickle
from functools import cache
from typing import Any

import pytest
import transformers

from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.multimodal import TextPart
from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.families import ALIASES, CASES
from tests.support.family_parts import SMALL
from tests.support.grids import chosen
from tests.support.multimodal_configs import CONFIGS

pytestmark = pytest.mark.usefixtures("quick_configs")

# End tokens are in other files too.
UNTESTED = {"model_type", "dtype", "torch_dtype", "bos_token_id", "eos_token_id"}
LENGTH = "max_position_embeddings"  # without it the context is bounded here: it may be shorter, never longer
UNTESTED.add("original_max_position_embeddings")  # of Phi 3, whose rope_parameters state it too
FIELDS = [name for name in ModelConfig.__dataclass_fields__ if name != "dtype"]


def copied(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy, in a tenth of the time of `deepcopy`."""
    copy: dict[str, Any] = pickle.loads(pickle.dumps(raw))
    return copy


def parsed(raw: dict[str, Any]) -> ModelConfig | None:
    try:
        return parse_config(TextPart.from_config(Fields(copied(raw), "config.json")).config)
    except ModelError:
        return None


@cache
def class_of(model_type: str) -> Any:
    return type(transformers.AutoConfig.for_model(model_type))


def completed(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Return a config with every key that it leaves out, as transformers reads it."""
    try:
        config = class_of(raw["model_type"]).from_dict(copied(raw))
        values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    except Exception:  # transformers requires the key
        return None
    return values


def differences(raw: dict[str, Any], section: str | None) -> list[str]:
    """Return the keys whose absence means something else here than in transformers."""
    whole = completed(raw)
    assert whole is not None
    original = parsed(whole)
    assert original is not None
    wrong = []
    for key in whole if section is None else whole[section]:
        if key in UNTESTED:
            continue
        shorter = copied(whole)
        del (shorter if section is None else shorter[section])[key]
        actual, complete = parsed(shorter), completed(shorter)
        if actual is None or complete is None:
            continue
        expected = original if complete == whole else parsed(complete)
        if expected is None:  # a default that does not fit these small models, such as 10 of 8 experts
            continue
        if key == LENGTH:
            wrong += [f"{key}: {actual.max_context}"] * (actual.max_context > expected.max_context)
            continue
        wrong += [f"{key}: {name}" for name in FIELDS if getattr(actual, name) != getattr(expected, name)]
    return wrong


def without_scale(model_type: str, wrong: list[str]) -> list[str]:
    # HyperCLOVA X has a scale by default, which is another way to say the same.
    return [line for line in wrong if (model_type, line) != ("hyperclovax", "attention_multiplier: attention_scale")]


NAMES = [name for name, (kind, _) in CASES.items() if kind not in ALIASES]
# One case of each family runs always, and those with a window.
QUICK = {*{CASES[name][0]: name for name in reversed(NAMES)}.values(), *(name for name in NAMES if "window" in name)}


@pytest.mark.parametrize("name", chosen(NAMES, QUICK))
def test_families(name: str) -> None:
    model_type, changes = CASES[name]
    wrong = differences({**SMALL, "intermediate_size": 96, **changes, "model_type": model_type}, None)
    assert not without_scale(model_type, wrong)


@pytest.mark.parametrize("name", CONFIGS)
def test_text_sections(name: str) -> None:
    outer, inner, text, sections = CONFIGS[name]
    section = {"model_type": inner, **SMALL, "intermediate_size": 96, **text}
    wrong = differences({"model_type": outer, "text_config": section, **sections}, "text_config")
    assert not without_scale(inner, wrong)


@pytest.mark.parametrize("name", CONFIGS)
def test_text_sections_without_sizes(name: str) -> None:
    """The sizes above are small: a window or a width of the class is seen only where all of them are absent."""
    outer, inner, _, sections = CONFIGS[name]
    raw = {"model_type": outer, "text_config": {"model_type": inner}, **sections}
    complete = completed(raw)
    expected = None if complete is None else parsed(complete)
    if expected is None:
        pytest.skip("the defaults of transformers' class are refused")
    try:
        actual = parse_config(TextPart.from_config(Fields(raw, "config.json")).config)
    except ModelError as error:
        assert "is missing" in error.message, "another default is wrong"
        pytest.skip("published files state the sizes")
    compared = [field for field in FIELDS if field not in ("bos", "eos", "tie_embeddings")]
    assert [field for field in compared if getattr(actual, field) != getattr(expected, field)] == []


# Files state their sizes; 9 layers show windows and kinds that repeat every few layers.
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", LENGTH)
OTHER_SIZES = {"gpt2", "gpt_bigcode", "gpt_neo"}  # their keys have other names
# Defaults that are refused: 15 of 9 layers share keys, and 96 heads have 4096 values.
STATED: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"num_kv_shared_layers": 3},
    "glm4_moe": {"num_attention_heads": 64},
}


@pytest.mark.parametrize("name", sorted({CASES[name][0] for name in NAMES} - OTHER_SIZES))
def test_families_with_their_sizes_alone(name: str) -> None:
    """Defaults for larger models: numbers of heads, windows, and the kinds of more than 3 layers."""
    raw = {"model_type": name, "num_hidden_layers": 9, "bos_token_id": 1, "eos_token_id": 2, **STATED.get(name, {})}
    complete = completed(raw)
    assert complete is not None
    actual, expected = parsed({**raw, **{key: complete[key] for key in SIZES if key in complete}}), parsed(complete)
    assert actual is not None and expected is not None
    wrong = [field for field in FIELDS if getattr(actual, field) != getattr(expected, field)]
    assert wrong == (["attention_scale"] if name == "hyperclovax" else [])  # which is the scale of the heads


@pytest.mark.parametrize("name", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "dots1"])
def test_windows_that_begin_or_end_at_a_late_layer(name: str) -> None:
    """With the default of `max_window_layers`, 28 or 62, and without `layer_types`; Qwen 3 MoE has neither key."""
    raw = {"model_type": name, "num_hidden_layers": 64, "sliding_window": 512, "hidden_size": 64}
    raw |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 97, "intermediate_size": 96}
    raw |= {"bos_token_id": 1, "eos_token_id": 2}
    raw |= {} if name == "dots1" else {"use_sliding_window": True}
    actual, complete = parsed(raw), completed(raw)
    assert actual is not None and complete is not None
    kinds = complete.get("layer_types", ["sliding_attention"] * 64)
    windows = [complete["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
    assert 512 in windows and list(actual.windows) == windows
