"""Test the check of precompiled maps of characters, with a map that the `tokenizers` library reads."""

import json
from base64 import b64encode
from collections.abc import Mapping

import pytest
import tokenizers

from mycli.runtime.tokenizer.charsmap import is_sound

TEXTS = "\xe9bc\0".encode()  # what the map gives for A
ROOT, LETTER = 256 << 10, 512 << 10 | 1 << 8 | ord("A")  # offsets to the next blocks; the letter has a value
UNITS = {0: ROOT, 256 ^ ord("A"): LETTER, (256 ^ ord("A")) ^ 512: 1 << 31}


def charsmap(units: Mapping[int, int], blocks: int = 4, texts: bytes = TEXTS) -> str:
    trie = b"".join(units.get(index, 0).to_bytes(4, "little") for index in range(256 * blocks))
    return b64encode(len(trie).to_bytes(4, "little") + trie + texts).decode()


def test_a_map_is_sound() -> None:
    assert is_sound(charsmap(UNITS))
    step = {"type": "Precompiled", "precompiled_charsmap": charsmap(UNITS)}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    library = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "normalizer": step, "model": model}))
    assert library.normalizer.normalize_str("xAz") == "x\xe9bcz"


@pytest.mark.parametrize(
    "encoded",
    [
        None,
        "not base64",
        "",
        b64encode((8).to_bytes(4, "little")).decode(),
        charsmap(UNITS, blocks=0),
        charsmap(UNITS | {0: 1024 << 10}),
        charsmap(UNITS, blocks=3, texts=b""),
        charsmap(UNITS | {(256 ^ ord("A")) ^ 512: 1 << 31 | 9}),
        charsmap(UNITS | {(256 ^ ord("A")) ^ 512: 1 << 31 | 1}),
        charsmap(UNITS, texts=b"\xff\0"),
        charsmap(UNITS, texts=b"a" * 65 + b"\0"),
    ],
    ids=[
        *("none", "no-base64", "empty", "short", "no-units", "child-beyond", "no-texts", "value-beyond"),
        *("inside-a-character", "no-utf-8", "long"),
    ],
)
def test_a_damaged_map_is_not(encoded: object) -> None:
    assert not is_sound(encoded)
