"""Converts tekken.json, the tokenizer in Mistral AI's own repositories, to tokenizer.json and tokenizer_config.json.

The layout is mistral-common's (`tokens/tokenizers/tekken.py`): byte-level BPE by rank, and ids that start with the
special tokens. The result equals that of transformers' MistralConverter and is checked like any tokenizer.json.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mycli.runtime.tokenizer.detokenizer import byte_alphabet
from mycli.runtime.tokenizer.gguf_bpe import bpe_model
from mycli.runtime.tokenizer.gguf_vocabulary import CONTROL, added_tokens
from mycli.runtime.tokenizer.split_patterns import KNOWN_PATTERNS, PreTokenizer
from mycli.runtime.utils.json_fields import Fields

TEKKEN_FILE = "tekken.json"
SPECIAL_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_MAX_TOKENS = 1 << 20
_MAX_BYTES = 1 << 22  # of all tokens, each a split to try; the published vocabularies have 878,258
# Files up to version 7 may have no list of special tokens: all used these.
_LEGACY_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_LEGACY_VERSIONS = ("v1", "v2", "v3", "v7")


def tokenizer_file(folder: Path) -> Path:
    """Return the path of tokenizer.json, or of tekken.json in a folder that has only this one."""
    path, tekken = folder / "tokenizer.json", folder / TEKKEN_FILE
    return tekken if tekken.is_file() and not path.exists() else path


def _special_tokens(raw: Fields, count: int) -> list[str]:
    entries = [Fields(item, f"{raw.source}: special_tokens") for item in raw.array("special_tokens", dict)]
    if raw.has("special_tokens"):
        texts = {entry.integer("rank", low=0): entry.text("token_str") for entry in entries}
    elif raw.object("config").text("version", "") in _LEGACY_VERSIONS:
        texts = dict(enumerate(_LEGACY_SPECIAL))
    else:
        raise raw.fail("special_tokens", "is missing")
    if sorted(texts) != list(range(max(len(entries), len(texts)))) or len(texts) > count:
        raise raw.fail(
            "special_tokens", f"must have ranks from 0 without gaps, below default_num_special_tokens {count}"
        )
    tokens = [texts[rank] for rank in sorted(texts)]
    tokens += [f"<SPECIAL_{index}>" for index in range(len(texts), count)]
    if len(set(tokens)) != count or "" in tokens:
        raise raw.fail("special_tokens", "holds an empty token or one token twice")
    return tokens


def _ranked_tokens(raw: Fields, count: int) -> list[bytes]:
    # The file lists more tokens than the model has: ranks from `count` on are not used.
    tokens: list[bytes] = []
    for index, item in enumerate(raw.array("vocab", dict, _MAX_TOKENS)[:count]):
        entry = Fields(item, f"{raw.source}: vocab")
        if entry.integer("rank", low=0) != index:
            raise entry.fail("rank", f"= {item['rank']} at place {index}: the list must be sorted, without gaps")
        try:
            tokens.append(base64.b64decode(entry.text("token_bytes"), validate=True))
        except (binascii.Error, ValueError):
            raise entry.fail("token_bytes", f"of rank {index} is not base64") from None
    if len(tokens) != count or len(set(tokens)) != count or b"" in tokens:
        raise raw.fail("vocab", f"must hold {count} different tokens (default_vocab_size without special tokens)")
    if tokens[:256] != [bytes([value]) for value in range(256)]:
        raise raw.fail("vocab", "must start with the 256 bytes")
    if sum(map(len, tokens)) > _MAX_BYTES:
        raise raw.fail("vocab", f"holds tokens of more than {_MAX_BYTES} bytes")
    return tokens


def _merges(ranks: Mapping[str, int]) -> list[list[str]]:
    # All splits of each token into two tokens. tiktoken, which mistral-common runs, joins the pair whose joined token
    # has the lowest rank, whatever its parts are.
    merges = []
    for token in ranks:
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [[left, right] for left, right in splits if left in ranks and right in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _bos_processor(special: Sequence[str]) -> dict[str, Any] | None:
    bos = SPECIAL_NAMES["bos_token"]
    if bos not in special:
        return None
    pieces = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    token = {"id": bos, "ids": [special.index(bos)], "tokens": [bos]}
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {bos: token}}


def tekken_to_json(raw: Fields) -> dict[str, Any]:
    """Return the tokenizer.json for a parsed tekken.json. Raises ModelError with the field at fault."""
    config = raw.object("config")
    pattern = config.text("pattern")
    if pattern not in KNOWN_PATTERNS:
        raise config.fail("pattern", "is not supported", "use a version of the model that has tokenizer.json")
    reserved = config.integer("default_num_special_tokens", high=_MAX_TOKENS)
    size = config.integer("default_vocab_size", low=reserved + 256, high=_MAX_TOKENS)
    special = _special_tokens(raw, reserved)
    characters = {byte: character for character, byte in byte_alphabet().items()}
    tokens = ["".join(characters[byte] for byte in token) for token in _ranked_tokens(raw, size - reserved)]
    if spelled := set(special).intersection(tokens):
        # One text would have two ids, which tokenizer.json cannot express; no published file has such a token.
        raise raw.fail("vocab", f"holds the special token {min(spelled)!r:.60}")
    ids = {token: reserved + rank for rank, token in enumerate(tokens)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(special, [CONTROL] * reserved),
        **PreTokenizer((pattern,)).sections(),
        "post_processor": _bos_processor(special),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": bpe_model(
            {token: index for index, token in enumerate(special)} | ids, _merges(ids), ignore_merges=True
        ),
    }
