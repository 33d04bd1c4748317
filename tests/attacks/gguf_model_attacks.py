"""Build hostile GGUF models: a small valid model with one key or tensor changed, and the expected error.

As in `gguf_attacks`, the bytes are assembled by hand. Both modules cover published vulnerabilities of GGUF readers:
`ADVISORIES` names each publication and the attacks of its class here.
"""

import struct
from collections.abc import Mapping
from typing import Any

from tests.attacks.gguf_attacks import ARRAY, BOOL, F32, I32, STRING, U8, U32, array, gguf, info, key, text

TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijkl"]
_SIZE, _KV = 32, 16
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": _SIZE,
    "llama.block_count": 1,
    "llama.feed_forward_length": _SIZE,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(TOKENS) - 259)],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(TOKENS) - 259)],
}
Stored = tuple[tuple[int, ...], int, int]  # dimensions in ggml's order, type, bytes
_F32, _Q8_0, _I8, _I32 = 0, 8, 24, 26


def _matrix(inputs: int, rows: int) -> Stored:
    return (inputs, rows), _F32, 4 * inputs * rows


TENSORS: dict[str, Stored] = {
    "token_embd.weight": _matrix(_SIZE, len(TOKENS)),
    "output_norm.weight": ((_SIZE,), _F32, 4 * _SIZE),
    "blk.0.attn_norm.weight": ((_SIZE,), _F32, 4 * _SIZE),
    "blk.0.attn_q.weight": _matrix(_SIZE, _SIZE),
    "blk.0.attn_k.weight": _matrix(_SIZE, _KV),
    "blk.0.attn_v.weight": _matrix(_SIZE, _KV),
    "blk.0.attn_output.weight": _matrix(_SIZE, _SIZE),
    "blk.0.ffn_norm.weight": ((_SIZE,), _F32, 4 * _SIZE),
    "blk.0.ffn_gate.weight": _matrix(_SIZE, _SIZE),
    "blk.0.ffn_up.weight": _matrix(_SIZE, _SIZE),
    "blk.0.ffn_down.weight": _matrix(_SIZE, _SIZE),
}


def _value(value: Any) -> tuple[int, bytes]:
    """Return type and bytes of a value; a pair of both is returned unchanged."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, bool):
        return BOOL, bytes([value])
    if isinstance(value, int):
        return U32, struct.pack("<I", value)
    if isinstance(value, float):
        return F32, struct.pack("<f", value)
    if isinstance(value, str):
        return STRING, text(value.encode())
    kind = STRING if isinstance(value[0], str) else F32 if isinstance(value[0], float) else I32
    parts = [
        text(item.encode()) if kind == STRING else struct.pack("<f" if kind == F32 else "<i", item) for item in value
    ]
    return ARRAY, array(kind, len(parts), b"".join(parts))


def model(metadata: Mapping[str, Any], tensors: Mapping[str, Stored | None]) -> bytes:
    """Return the valid model with replaced values; None removes an entry; all weights are 0."""
    keys = {name: item for name, item in {**METADATA, **metadata}.items() if item is not None}
    table = {name: item for name, item in {**TENSORS, **tensors}.items() if item is not None}
    entries, offset = [], 0
    for name, (shape, kind, nbytes) in table.items():
        entries.append(info(name.encode(), shape, kind, offset))
        offset += -(-nbytes // 32) * 32
    return gguf(tuple(key(name.encode(), *_value(item)) for name, item in keys.items()), tuple(entries), bytes(offset))


def _vocabulary(**more: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in more.items()}


def _named(architecture: str) -> dict[str, Any]:
    """Return the valid model's keys under another architecture's name."""
    llama = {name: value for name, value in METADATA.items() if name.startswith("llama.")}
    renamed = {f"{architecture}.{name.removeprefix('llama.')}": value for name, value in llama.items()}
    return {"general.architecture": architecture, **renamed}


_BEYOND = "is not one of the 272 tokens"
_LONG = [f"{index:01000d}" for index in range(5000)]
Attack = tuple[dict[str, Any], dict[str, Stored | None], str]
MODEL_ATTACKS: dict[str, Attack] = {
    "scores-short": (_vocabulary(scores=[0.0] * 5), {}, "scores must be 272 floats"),
    "scores-of-bytes": (_vocabulary(scores=(ARRAY, array(U8, 272, bytes(272)))), {}, "scores must be 272 floats"),
    "scores-of-text": (_vocabulary(scores=["a"] * 272), {}, "scores must be 272 floats"),
    "scores-none": (_vocabulary(scores=None), {}, "scores must be 272 floats"),
    "token-types-short": (_vocabulary(token_type=[1, 1]), {}, "token_type must be 272 integers"),
    "token-types-of-floats": (_vocabulary(token_type=[1.0] * 272), {}, "token_type must be 272 integers"),
    "token-types-of-bytes-short": (_vocabulary(token_type=(ARRAY, array(U8, 68, bytes(68)))), {}, "token_type must be"),
    "tokens-of-numbers": (_vocabulary(tokens=[1, 2, 3]), {}, "tokens"),
    "tokens-none-in-the-array": (_vocabulary(tokens=(ARRAY, array(STRING, 0))), {}, "tokens is missing or empty"),
    "token-of-2000-characters": (_vocabulary(tokens=["a" * 2000, *TOKENS[1:]]), {}, "a token of 2000 characters"),
    "tokens-with-five-million-cuts": (
        _vocabulary(tokens=_LONG, scores=[0.0] * 5000, token_type=[1] * 5000),
        {"token_embd.weight": _matrix(_SIZE, 5000)},
        "5000000 characters, more than",
    ),
    "more-tokens-than-rows": (
        _vocabulary(tokens=[*TOKENS, "x"], scores=[0.0] * 273, token_type=[1] * 273),
        {},
        "shape|embedding rows",
    ),
    **{
        f"{name}-beyond-the-tokens": (_vocabulary(**{f"{name}_token_id": 1 << 31}), {}, _BEYOND)
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    },
    "merges-of-numbers": (_vocabulary(merges=[1, 2]), {}, "merges"),
    "merge-of-one-word": (_vocabulary(merges=["ab"]), {}, "does not join two tokens"),
    "template-of-bytes": ({"tokenizer.chat_template": (ARRAY, array(U8, 4, bytes(4)))}, {}, "chat_template"),
    "heads-of-no-width": ({"llama.attention.key_length": 0, "llama.rope.dimension_count": 4}, {}, "key_length"),
    "theta-0": ({"llama.rope.freq_base": 0.0}, {"rope_freqs.weight": ((8,), _F32, 32)}, "freq_base"),
    "frequency-factors-0": ({}, {"rope_freqs.weight": ((8,), _F32, 32)}, "rope_freqs.weight holds frequency factors"),
    "no-heads": ({"llama.attention.head_count": 0}, {}, "head_count"),
    "no-kv-heads": ({"llama.attention.head_count_kv": 0}, {}, "head_count_kv"),
    "heads-of-each-layer": ({"llama.attention.head_count": [2, 0]}, {}, "head_count"),
    "no-layers": ({"llama.block_count": 0}, {}, "block_count"),
    "layers-2^31": ({"llama.block_count": 1 << 31}, {}, "block_count"),
    "layers-2^31-with-a-list-of-their-kinds": (
        {**_named("gemma3"), "gemma3.block_count": (1 << 31) - 1},
        {},
        "gemma3.block_count",
    ),
    "layers-of-text": ({"llama.block_count": "1"}, {}, "block_count"),
    "no-width": ({"llama.embedding_length": 0}, {}, "embedding_length"),
    "width-2^31": ({"llama.embedding_length": 1 << 31}, {}, "head_dim|elements|shape"),
    "head-of-0": ({"llama.attention.key_length": 0, "llama.attention.value_length": 0}, {}, "key_length"),
    "rotation-2^31": ({"llama.rope.dimension_count": 1 << 31}, {}, "rope|rotary"),
    "more-experts-used-than-there-are": ({"llama.expert_count": 2, "llama.expert_used_count": 9}, {}, "expert"),
    "part-of-65535": ({"split.count": 65535, "split.no": 0, "split.tensors.count": 11}, {}, "one of 65535 parts"),
    "norm-of-blocks": ({}, {"output_norm.weight": ((_SIZE,), _Q8_0, 34)}, "output_norm.weight is Q8_0, but norms"),
    "embedding-of-integers": ({}, {"token_embd.weight": ((_SIZE, 272), _I32, 4 * _SIZE * 272)}, "I32"),
    "weight-of-bytes": ({}, {"blk.0.attn_q.weight": ((_SIZE, _SIZE), _I8, _SIZE * _SIZE)}, "I8"),
    "weight-of-three-dimensions": ({}, {"blk.0.attn_q.weight": ((_SIZE, _SIZE // 2, 2), _F32, 4 * _SIZE**2)}, "shape"),
    "weight-of-half-the-rows": ({}, {"blk.0.attn_q.weight": _matrix(_SIZE, _SIZE // 2)}, "shape"),
    "weight-missing": ({}, {"blk.0.ffn_up.weight": None}, "missing"),
    "weight-of-another-layer": ({}, {"blk.1.ffn_up.weight": _matrix(_SIZE, _SIZE)}, "not part of the model"),
}
# Inputs that make other programs read or write out of bounds and are harmless here: the model is read as usual.
HARMLESS: dict[str, Attack] = {
    "byte-token-negative": (_vocabulary(tokens=[*TOKENS[:3], "<0x-1>", *TOKENS[4:]]), {}, ""),
    "byte-token-of-300": (_vocabulary(tokens=[*TOKENS[:3], "<0x12C>", *TOKENS[4:]]), {}, ""),
    "byte-tokens-missing": (_vocabulary(token_type=[2, 3, 3, *[1] * 269]), {}, ""),
    "no-special-ids": (_vocabulary(bos_token_id=None, eos_token_id=None), {}, ""),
    "weight-with-an-axis-of-one": ({}, {"blk.0.attn_q.weight": ((_SIZE, _SIZE, 1), _F32, 4 * _SIZE**2)}, ""),
    "an-empty-array": ({"general.tags": (ARRAY, array(STRING, 0))}, {}, ""),
}
# The template of a file is run in a sandboxed child process (`tests/attacks/templates`).
ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"

# Publication -> attacks of its class, by their names in `gguf_attacks.ATTACKS`, `MODEL_ATTACKS` and `HARMLESS`.
ADVISORIES: dict[str, tuple[str, ...]] = {
    "CVE-2024-21802, dimensions of a tensor beyond its array": ("five-dimensions", "dimensions-2^32"),
    "CVE-2024-21825, length of an array times its element": ("array-size-overflows", "array-2^64"),
    "CVE-2024-21836, count of tensors times their size": ("tensors-2^63", "tensors-2^64", "tensors-beyond-the-file"),
    "CVE-2024-23496, length of a string plus one": ("key-length-2^64", "string-2^64", "key-length-overflows-position"),
    "CVE-2024-23605, count of keys times their size": ("keys-2^64",),
    "CVE-2024-32878, memory freed that was never filled": ("keys-beyond-the-file", "array-of-strings-beyond"),
    "CVE-2024-41130, what was never read is followed": ("unknown-value-type", "array-of-unknown", "an-empty-array"),
    "CVE-2024-34359, template of a file runs programs": ("template-of-bytes",),
    "CVE-2025-49847, length of a token's text as 32 bits": ("token-of-2000-characters",),
    "CVE-2025-53630, sizes of tensors overflow together": ("sizes-overflow-together", "bytes-overflow-when-padded"),
    "CVE-2026-27940, size of the table overflows": ("tensors-2^64", "sizes-overflow-together"),
    "CVE-2026-33298, size of a tensor of blocks overflows": ("product-of-blocks-overflows", "product-overflows-small"),
    "GHSA-3p75-pq92-q28f, division by a dimension of 0": ("dimension-0", "dimension-0-of-2", "dimension-0-of-4"),
    "GHSA-g4cc-763q-h9h6, ids of special tokens": ("eos-beyond-the-tokens", "padding-beyond-the-tokens"),
    "llama.cpp 3634, 25508, ids without a token": ("no-special-ids", "bos-beyond-the-tokens"),
    "llama.cpp 20735, scores and types fewer than tokens": ("scores-short", "token-types-short"),
    "llama.cpp 26690, elements narrower than they are read": ("scores-of-bytes", "token-types-of-bytes-short"),
    "llama.cpp 26511, byte tokens that are none": ("byte-token-negative", "byte-token-of-300", "byte-tokens-missing"),
    "llama.cpp 25821, 26051, more layers than an array": ("layers-2^31", "weight-of-another-layer"),
    "llama.cpp 26318, alignment of another type": ("alignment-text", "alignment-2^31", "bytes-overflow-when-padded"),
    "llama.cpp 27203, product of dimensions negative": ("product-negative",),
    "llama.cpp 24884, key without a name": ("key-empty",),
    "llama.cpp 19856, negative type, keys twice": ("negative-value-type", "key-twice", "alignment-3"),
    "CVE-2024-39720, a file of four bytes": ("magic-only",),
    "CVE-2025-0315, memory by what a file says": ("string-beyond-the-file", "array-beyond-the-file"),
    "CVE-2025-0317, alignment of 0": ("alignment-0",),
    "CVE-2024-12055, types out of range": ("unknown-type", "removed-type"),
    "CVE-2026-7482, data of a tensor beyond the file": ("data-of-a-larger-tensor", "offset-beyond-the-file"),
    "heads and experts that divide by 0": ("no-heads", "no-kv-heads", "heads-of-each-layer", "head-of-0"),
}
