"""Test that files of Ollama's converter are read as the files of llama.cpp's converter for the same model."""

import re
from dataclasses import replace
from typing import Any

import pytest

from mycli.runtime.checkpoint.gguf.ollama import as_llama_cpp
from tests.support.gguf_facts import FACTS, gguf_folder, gguf_header

# Recorded model: Ollama's architecture; its names of keys; patterns of tensors; keys that it has, or lacks (None).
FILES: dict[str, tuple[str, dict[str, str], dict[str, str], dict[str, Any]]] = {
    "gpt_oss-window7-gqa4:2": (
        "gptoss",
        {},
        {"attn_output": "attn_out", r"attn_sinks\.weight": "attn_sinks", "post_attention_norm": "ffn_norm"},
        {"rope.scaling.type": None, "expert_feed_forward_length": None, "tokenizer.ggml.pre": "default"},
    ),
    "qwen2_5_vl": (
        "qwen25vl",
        {"rope.dimension_sections": "rope.mrope_section"},
        {},
        {"tokenizer.ggml.pre": "qwen2"},
    ),
    "olmo3-window7": ("olmo3", {}, {}, {}),
    "ministral3-beyond": (
        "mistral3",
        {
            "rope.scaling.yarn_log_multiplier": "rope.scaling.mscale_all_dim",
            "attention.temperature_scale": "rope.scaling_beta",
        },
        {},
        {"tokenizer.ggml.pre": "default"},
    ),
    "laguna-heads-by-layer-window7": (
        "laguna",
        {"rope.freq_base_swa": "rope.swa.freq_base", "rope.dimension_count_swa": "rope.swa.dimension_count"},
        {"attn_gate": "attn_g"},
        {},
    ),
    "gemma3n-sparse-shared-kv": ("gemma3n", {"rope.freq_base_swa": "rope.freq_base_local"}, {}, {}),
    "qwen3_5-delta": ("qwen35", {}, {r"ssm_dt\.bias": "ssm_dt"}, {"attention.head_count_kv": [0, 0, 0, 2]}),
    "qwen3_5_moe-8top3": ("qwen35moe", {}, {r"ssm_dt\.bias": "ssm_dt"}, {"attention.head_count_kv": [0, 0, 0, 2]}),
    "qwen3_next-8top3": ("qwen3next", {}, {r"ssm_dt\.bias": "ssm_dt"}, {"attention.head_count_kv": [0, 0, 0, 2]}),
    "lfm2-tied": (
        "lfm2",
        {},
        {"token_embd_norm": "output_norm"},
        {"feed_forward_length": 123, "tokenizer.ggml.pre": "default"},
    ),
    "nemotron_h-every-kind": (
        "nemotron_h_moe",
        {},
        {"ffn_latent_down": "ffn_latent_in", "ffn_latent_up": "ffn_latent_out"},
        {"moe_latent_size": None},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_models_of_ollama_are_read_as_those_of_llama_cpp(name: str) -> None:
    facts, (source, names, patterns, changes) = FACTS[name], FILES[name]
    target = facts["keys"]["general.architecture"]
    keys: dict[str, Any] = {}
    for key, value in facts["keys"].items():
        own = key.removeprefix(f"{target}.")
        keys[key if own == key else f"{source}.{names.get(own, own)}"] = value
    for key, value in changes.items():
        keys[key if key.startswith("tokenizer.") else f"{source}.{key}"] = value
    keys = {key: value for key, value in keys.items() if value is not None} | {"general.architecture": source}
    tensors = {"v.patch_embd.weight": [8, 8], "mm.a.1.weight": [8, 8], "mtp.fc.weight": [8, 8], "a.conv.bias": [8]}
    for tensor, shape in facts["tensors"].items():
        for pattern, replacement in patterns.items():
            tensor = re.sub(rf"\b{pattern}\b", replacement, tensor)
        tensors[tensor] = shape
    if name.startswith(("qwen3_5", "qwen3_next")):  # one attention layer in four
        assert keys[f"{source}.block_count"] == 4
    expected = gguf_folder(facts)
    actual = gguf_folder({**facts, "keys": keys, "tensors": tensors})
    assert actual.config == replace(expected.config, build_layer=actual.config.build_layer)
    assert actual.config.layer_specs == expected.config.layer_specs
    shapes = [
        {tensor: entry.shape for tensor, entry in f.checked_manifest().tensors.items()} for f in (actual, expected)
    ]
    assert shapes[0] == shapes[1]
    rules = {"gptoss": "gpt-4o", "mistral3": "tekken", "lfm2": "lfm2", "qwen25vl": "qwen2"}
    assert actual.header.metadata.text("tokenizer.ggml.pre") == rules.get(source, "gpt-2")


def test_glm_4_7_flash_of_ollama_is_read() -> None:
    """Its sizes of heads and of the cache are in each other's keys."""
    facts = FACTS["deepseek_v3-groups-yarn"]
    keys = {key.replace("deepseek2.", "glm4moelite."): value for key, value in facts["keys"].items()}
    expected = gguf_folder(facts).config
    latent = expected.layer_specs[0].latent
    assert latent is not None
    head, rank = latent.head_dim, latent.rank
    sizes = {"head_count_kv": 4, "key_length": head, "value_length": head, "key_length_mla": rank + latent.rope_dim}
    keys |= {f"glm4moelite.attention.{name}": value for name, value in {**sizes, "value_length_mla": rank}.items()}
    keys["general.architecture"] = "glm4moelite"
    header = as_llama_cpp(gguf_header(keys, facts["tensors"]))
    values = {name: header.metadata.values[f"deepseek2.attention.{name}"] for name in (*sizes, "value_length_mla")}
    cached = {"head_count_kv": 1, "key_length": rank + latent.rope_dim, "value_length": rank}
    assert values == {**cached, "key_length_mla": head, "value_length_mla": head}
    assert header.metadata.values["tokenizer.ggml.pre"] == "glm4"


def test_gemma_4_of_ollama_names_another_tokenizer() -> None:
    keys = {"general.architecture": "gemma4", "tokenizer.ggml.model": "llama"}
    scales = {"blk.0.ffn_gate_inp.per_expert_scale": [8], "model.vision_tower.conv.weight": [8, 8]}
    header = as_llama_cpp(gguf_header(keys, scales))
    assert header.metadata.values["tokenizer.ggml.model"] == "gemma4"
    assert list(header.tensors) == ["blk.0.ffn_down_exps.scale"]


def test_gemma_3n_of_ollama_gets_bytes() -> None:
    tokens = ["a", "<0x0A>", "<unused3>", "<end_of_turn>"]
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 1, 3, 3]}
    header = as_llama_cpp(gguf_header({**keys, "general.architecture": "gemma3n"}, {}))
    assert header.metadata.values["tokenizer.ggml.model"] == "llama"
    assert list(header.metadata.values["tokenizer.ggml.token_type"]) == [1, 6, 1, 3]


def test_experts_of_nemotron_omni_make_it_a_mixture() -> None:
    keys = {"general.architecture": "nemotron_h_omni", "nemotron_h_omni.expert_count": 8}
    mixture = as_llama_cpp(gguf_header(keys, {"blk.0.ffn_latent_in.weight": [8, 4]})).metadata.values
    assert (mixture["general.architecture"], mixture["nemotron_h_moe.moe_latent_size"]) == ("nemotron_h_moe", 4)
    dense = as_llama_cpp(gguf_header({"general.architecture": "nemotron_h_omni"}, {})).metadata.values
    assert dense["general.architecture"] == "nemotron_h"


@pytest.mark.parametrize(
    ("stored", "rule"), [(None, "llama-bpe"), ("default", "llama-bpe"), ("smaug-bpe", "smaug-bpe")]
)
def test_llama_3_without_a_pre_tokenizer_has_its_own(stored: str | None, rule: str) -> None:
    tokens = [f"t{index}" for index in range(128256)]
    tokens[128006], tokens[128009] = "<|start_header_id|>", "<|eot_id|>"
    keys = {"general.architecture": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.pre": stored}
    assert as_llama_cpp(gguf_header(keys, {})).metadata.values["tokenizer.ggml.pre"] == rule
    keys["tokenizer.ggml.tokens"] = tokens[:1000]
    assert as_llama_cpp(gguf_header(keys, {})).metadata.values["tokenizer.ggml.pre"] == stored
