"""Builds byte tokenizers for single tests."""

import base64
import json
from pathlib import Path
from typing import Any

from mycli.runtime.tokenizer.split_patterns import TEKKEN
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.paths import ROOT

ATTACKS = ROOT / "tests/attacks/tokenizers"
SIMPLE = "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"


def make(folder: Path, template: str | None = None, **changes: Any) -> Tokenizer:
    """Write a byte tokenizer of 256 tokens with `changes` of its tokenizer.json; <end> (special) is id 256."""
    table = [chr(b) for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
    table += [chr(256 + index) for index in range(256 - len(table))]
    values = json.loads((ATTACKS / "plain.json").read_text())
    values["model"] |= {"vocab": {character: index for index, character in enumerate(table)}, "merges": []}
    values["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    values["added_tokens"] = [added(256, "<end>", special=True)]
    values |= changes
    (folder / "tokenizer.json").write_text(json.dumps(values))
    names = {"eos_token": "<end>", "bos_token": "<bos>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return Tokenizer.load(folder, 300)


def added(token_id: int, content: str, **changes: Any) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": token_id, "content": content} | flags | changes


def tekken(**changes: Any) -> dict[str, Any]:
    """Return a tekken.json of 291 ids: 24 special tokens, 256 bytes, 11 joined tokens; 2 more tokens are not used."""
    joined = (b"th", b"he", b"the", b" t", b" the", b"in", b"ing", b"\xc3\xa9", b"aa", b"aaa", b"\r\n", b"qq", b"zz")
    tokens = [*(bytes([value]) for value in range(256)), *joined]
    return {
        "config": {
            "pattern": TEKKEN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": 291,
            "default_num_special_tokens": 24,
            "version": "v3",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        **changes,
    }
