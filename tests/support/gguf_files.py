"""Writes GGUF files of models with the gguf library, following llama.cpp's converters.

Uses no code of the reader or the exporter under test, except the names of the tokenizer's keys (whose values are
compared elsewhere).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file
from torch import Tensor

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "self_attn.gate_proj": "attn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_GEMMA = {**_AFTER, "pre_feedforward_layernorm": "ffn_norm"}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
}


# llama.cpp rotates neighbours in these, so the converter reorders rows of q and k.
_PAIRED = ("baichuan", "deci", "internlm2", "llama", "llama-embed", "muse-glimmer", "smollm3", "xverse")


def _name(name: str, arch: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    names = {**_LAYER, **(_GEMMA if arch.startswith(("gemma", "muse")) else _AFTER if arch == "olmo2" else {})}
    return f"blk.{layer}.{names[part]}.{kind}"


def _for_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows as LlamaModel.permute in llama.cpp's conversion/llama.py."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _fused(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    queries = [name for name in weights if ".attn_q." in name]
    parts = {name: [name.replace("attn_q", f"attn_{part}") for part in "qkv"] for name in queries}
    others = {name: weight for name, weight in weights.items() if name not in sum(parts.values(), [])}
    joined = {
        name.replace("attn_q", "attn_qkv"): torch.cat([weights[part] for part in parts[name]]) for name in queries
    }
    return others | joined


def write_model(
    folder: Path,
    path: Path,
    arch: str,
    kind: str,
    config: Mapping[str, Any],
    keys: Mapping[str, Any],
    extra: Mapping[str, Sequence[Any]] | None = None,
    *,
    fused_qkv: bool = False,
) -> None:
    """Write the safetensors of `folder` as a GGUF file of architecture `arch`, matrices in the type `kind`.

    `config` is the model's config.json; `keys` override the metadata derived from it; `extra` are additional F32
    tensors; `fused_qkv` joins q, k and v of a layer, as the converter's --fuse-qkv.
    """
    writer = gguf.GGUFWriter(path, arch)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    rope = config.get("rope_parameters") or {}
    values: dict[str, Any] = {
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": hidden,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": rope.get("full_attention", rope).get("rope_theta", 10000.0),
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
    }
    for key, value in {**values, **keys}.items():
        if key == "general.architecture":  # the library writes it itself
            writer.kv_data[0].pop(key)
        _add(writer, key, value)
    for name, factors in (extra or {}).items():
        writer.add_tensor(name, np.array(factors, dtype=np.float32))
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        weight = tensor.float()
        if arch in _PAIRED and name.split(".")[-2] in ("q_proj", "k_proj"):
            weight = _for_pairs(weight, len(weight) // head_dim)
        if arch.startswith(("gemma", "muse")) and name.endswith(
            "norm.weight" if "gemma" in arch else "layernorm.weight"
        ):
            weight = weight + 1
        weights[_name(name, arch)] = weight
    for name, weight in (_fused(weights) if fused_qkv else weights).items():
        stored = weight.numpy()
        if stored.ndim == 1 or kind == "F32":
            writer.add_tensor(name, stored)
        elif kind == "F16":
            writer.add_tensor(name, stored.astype(np.float16))
        else:
            quantized = quants.quantize(stored, GGMLQuantizationType[kind])
            writer.add_tensor(name, quantized, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def rewrite(path: Path, tensors: Callable[[dict[str, Tensor]], Mapping[str, Any]], **keys: Any) -> Path:
    """Write the F32 file `path` again with the tensors that `tensors` makes of its own, and with further keys.

    A tensor is fp32, or a pair of blocks of a ggml type and this type.
    """
    reader, target = gguf.GGUFReader(path), path.with_name(f"rewritten-{path.name}")
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, stored in reader.fields.items():
        if name not in ("general.architecture", *keys) and not name.startswith("GGUF."):
            kinds = stored.types
            writer.add_key_value(name, stored.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    for name, value in keys.items():
        _add(writer, name, value)
    original = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    for name, values in tensors(original).items():
        if isinstance(values, tuple):
            writer.add_tensor(name, values[0], raw_dtype=values[1])
        else:
            writer.add_tensor(name, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def byte_tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return the smallest vocabulary that can encode any text: GPT-2's byte alphabet, and unused rows."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(256 - len(printable))]
    tokens = [*letters[: vocab_size - 1], "<|im_end|>"]
    tokens += [f"[PAD{index}]" for index in range(len(tokens), vocab_size)]
    types = [1] * min(256, vocab_size - 1) + [3]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types + [5] * (vocab_size - len(types)),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }


def published_tokenizer(folder: Path, rule: str) -> dict[str, Any]:
    """Return a folder's byte-level BPE vocabulary as a converter writes it, with pre-tokenizer `rule`."""
    raw = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    special = {token["id"]: token for token in raw["added_tokens"]}
    tokens = {index: token for token, index in raw["model"]["vocab"].items()}
    tokens |= {index: token["content"] for index, token in special.items()}
    listed = [tokens[index] for index in range(len(tokens))]
    types = [(3 if special[i]["special"] else 4) if i in special else 1 for i in range(len(listed))]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": listed,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["model"]["merges"]],
    }
    for name in ("bos", "eos"):
        if f"{name}_token" in settings:
            found[f"tokenizer.ggml.{name}_token_id"] = listed.index(settings[f"{name}_token"])
    if "chat_template" in settings:
        found["tokenizer.chat_template"] = settings["chat_template"]
    return found
