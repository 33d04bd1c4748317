"""Reads GGUF files of Ollama's converter as llama.cpp's converter would have written them. Imports no torch.

Follows Ollama's llama/compat, which changes the files of its library in the same way before llama.cpp reads them.
"""

import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mycli.runtime.checkpoint.gguf.header import GgufHeader
from mycli.runtime.checkpoint.safetensors_header import TensorEntry
from mycli.runtime.tokenizer.gguf_vocabulary import BYTE, NORMAL, ggml_key
from mycli.runtime.utils.json_fields import Fields

# Of models for images and sounds, and of MTP heads, which are in the same file.
_OTHER_PARTS = ("a.", "v.", "mm.", "model.vision_tower.", "mtp.")
_ARCHITECTURES = {
    "gptoss": "gpt-oss",
    "qwen25vl": "qwen2vl",
    "olmo3": "olmo2",
    "glm4moelite": "deepseek2",
    "nemotron_h_omni": "nemotron_h",
}
# By Ollama's architecture: keys without the architecture in front, parts of tensor names, pre-tokenizers.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "qwen25vl": {"rope.mrope_section": "rope.dimension_sections"},
    "mistral3": {
        "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
        "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
        "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
        "rope.scaling_beta": "attention.temperature_scale",
    },
    "laguna": {"rope.swa.dimension_count": "rope.dimension_count_swa", "rope.swa.freq_base": "rope.freq_base_swa"},
    "gemma3n": {"rope.freq_base_local": "rope.freq_base_swa"},
}
_DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")
_TENSORS: Mapping[str, Mapping[str, str]] = {
    "gptoss": {
        r"\.attn_out\.": ".attn_output.",
        r"\.attn_sinks$": ".attn_sinks.weight",
        r"\.ffn_norm\.": ".post_attention_norm.",
    },
    "gemma4": {r"\.ffn_gate_inp\.per_expert_scale$": ".ffn_down_exps.scale"},
    "laguna": {r"\.attn_g\.weight$": ".attn_gate.weight"},
    "gemma-embedding": {r"^dense\.0\.": "dense_2.", r"^dense\.1\.": "dense_3.", r"^norm\.": "output_norm."},
    "lfm2": {"^output_norm": "token_embd_norm"},
    "nemotron_h_moe": {r"\.ffn_latent_in\.": ".ffn_latent_down.", r"\.ffn_latent_out\.": ".ffn_latent_up."},
    **dict.fromkeys(_DELTA_NETS, {r"\.ssm_dt$": ".ssm_dt.bias"}),
}
# A key that is missing or wrong, and the tensor of a layer whose rows it counts.
_SIZES = {
    "lfm2": ("feed_forward_length", ".ffn_gate.weight"),
    "nemotron_h_moe": ("moe_latent_size", ".ffn_latent_down.weight"),
}
_RULES = {"gptoss": "gpt-4o", "glm4moelite": "glm4", "mistral3": "tekken", "lfm2": "lfm2"}
_WRONG_RULES = ("gptoss", "glm4moelite")  # whose files name another
_LLAMA3 = ((128009, "<|eot_id|>"), (128006, "<|start_header_id|>"))


def as_llama_cpp(header: GgufHeader) -> GgufHeader:
    """Return the header with llama.cpp's keys and tensor names; one of llama.cpp's own files stays as it is."""
    stored = header.metadata.values
    source = stored.get("general.architecture")
    if not isinstance(source, str):
        return header
    target = _ARCHITECTURES.get(source, source)
    if source == "nemotron_h_omni" and stored.get(f"{source}.expert_count"):
        target += "_moe"
    if source == "gemma3" and "dense.0.weight" in header.tensors:
        target = "gemma-embedding"
    names = {key: _key(key, source, target) for key in stored}
    # Of a file with both names of a key, the value of llama.cpp's counts.
    values = {name: stored[key] for key, name in names.items() if name == key or name not in stored}
    values["general.architecture"] = target
    tensors = dict(_renamed(header.tensors, target if target in _TENSORS else source))
    _set_tokenizer(values, source, tensors)
    if source == "gptoss":
        values.setdefault("gpt-oss.rope.scaling.type", "yarn")
    elif source == "glm4moelite":
        _set_latent_sizes(values)
    elif source in _DELTA_NETS:
        _set_key_heads(values, f"{source}.attention.head_count_kv")
    if target in _SIZES:
        key, ending = _SIZES[target]
        rows = [entry.shape[0] for name, entry in tensors.items() if name.endswith(ending) and entry.shape]
        values |= {f"{target}.{key}": rows[0]} if rows else {}
    arrays = {names[key]: entry for key, entry in header.arrays.items()}
    return replace(header, metadata=Fields(values, header.metadata.source), tensors=tensors, arrays=arrays)


def _key(key: str, source: str, target: str) -> str:
    if not key.startswith(f"{source}."):
        return key
    name = key.removeprefix(f"{source}.")
    return f"{target}.{_KEYS.get(source, {}).get(name, name)}"


def _renamed(tensors: Mapping[str, TensorEntry], kind: str) -> Iterator[tuple[str, TensorEntry]]:
    for stored, entry in tensors.items():
        if stored.startswith(_OTHER_PARTS):
            continue
        name = stored
        for pattern, replacement in _TENSORS.get(kind, {}).items():
            name = re.sub(pattern, replacement, name)
        name = stored if name in tensors else name
        yield name, replace(entry, name=name)


def _set_tokenizer(values: dict[str, Any], source: str, tensors: Mapping[str, TensorEntry]) -> None:
    tokens, kind, rule = values.get(ggml_key("tokens")), values.get(ggml_key("model")), _RULES.get(source)
    if not isinstance(tokens, list):
        return
    if source == "llama" and all(len(tokens) > index and tokens[index] == text for index, text in _LLAMA3):
        rule = "llama-bpe"
    if rule is not None and (source in _WRONG_RULES or values.get(ggml_key("pre")) in (None, "", "default")):
        values[ggml_key("pre")] = rule
    if source == "gemma4" and kind == "llama":
        values[ggml_key("model")] = "gemma4"
    types = values.get(ggml_key("token_type"))
    if source == "gemma3n" and kind == "gpt2" and isinstance(types, array) and len(types) == len(tokens):
        values[ggml_key("model")] = "llama"
        values[ggml_key("token_type")] = array("i", map(_spelled_type, tokens, types))
    embedding = tensors.get("token_embd.weight")
    if source == "gemma3" and embedding is not None and embedding.shape:
        # It lists a token more than the embedding has rows; elsewhere that is an error.
        for key in map(ggml_key, ("tokens", "scores", "token_type")):
            if isinstance(listed := values.get(key), list | array):
                values[key] = listed[: embedding.shape[0]]


def _spelled_type(token: str, kind: int) -> int:
    return BYTE if re.fullmatch("<0x[0-9A-F]{2}>", token) else NORMAL if token.startswith("<unused") else kind


def _set_latent_sizes(values: dict[str, Any]) -> None:
    # Ollama has the sizes of whole heads where llama.cpp has those of the cache, and the other way round.
    prefix = "deepseek2.attention."
    head, rank = values.get(f"{prefix}key_length"), values.get(f"{prefix}kv_lora_rank")
    rotated = values.get("deepseek2.rope.dimension_count")
    if isinstance(rank, int) and isinstance(rotated, int):
        values |= {f"{prefix}key_length": rank + rotated, f"{prefix}value_length": rank, f"{prefix}head_count_kv": 1}
        values |= {f"{prefix}key_length_mla": head, f"{prefix}value_length_mla": head}


def _set_key_heads(values: dict[str, Any], key: str) -> None:
    # Ollama lists 0 for the layers without attention.
    counts = values.get(key)
    if isinstance(counts, array) and len(counts):
        values[key] = max(counts)
