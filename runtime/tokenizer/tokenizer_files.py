"""Reads tokenizer.json and tokenizer_config.json, which are untrusted: every id and name is checked."""

import json
from pathlib import Path
from typing import Any

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer import tekken
from mycli.runtime.tokenizer.chat_template import ChatTemplate, special_tokens_map
from mycli.runtime.tokenizer.special_tokens import AddedToken
from mycli.runtime.utils.json_fields import Fields, parse_object, read_bytes, read_object
from mycli.runtime.utils.memory import gc_paused

MAX_FILE_BYTES = 128 << 20
MAX_CONFIG_BYTES = 8 << 20
MAX_TOKENS = 1 << 22
SENTENCEPIECE = "tokenizer.model"
MAX_ADDED = 100_000


def read_vocabulary(raw: Fields, vocab_size: int) -> list[str | None]:
    """Return the tokens of tokenizer.json by id, None where there is none. Raises ModelError."""
    section = raw.object("model")
    vocab = section.values.get("vocab")
    if isinstance(vocab, dict):
        pairs = list(vocab.items())
    elif isinstance(vocab, list):  # Unigram: [token, score] by id
        pairs = [(item[0] if isinstance(item, list) and item else None, index) for index, item in enumerate(vocab)]
    else:
        raise section.fail("vocab", "must be an object or a list")
    if section.has("dropout") and section.number("dropout") > 0:
        raise section.fail("dropout", "is not supported: encoding would be random")
    table: list[str | None] = [None] * min(vocab_size, MAX_TOKENS)
    for token, index in pairs:
        if type(index) is int and 0 <= index < len(table) and table[index] is None and type(token) is str:
            table[index] = token
        else:
            raise _bad_id(section, "vocab", table, token, index)
    return table


def _bad_id(raw: Fields, key: str, table: list[str | None], token: Any, index: Any) -> ModelError:
    if type(index) is not int or type(token) is not str:
        return raw.fail(key, f"holds {str(token)!r:.60} with id {str(index)!r:.40}")
    if not 0 <= index < len(table):
        return raw.fail(key, f"gives {token!r:.60} id {index}, but the model has {len(table)} embedding rows")
    return raw.fail(key, f"gives id {index} to both {table[index]!r:.60} and {token!r:.60}")


def read_added(raw: Fields, table: list[str | None]) -> list[AddedToken]:
    """Return the added tokens, and put them into `table`. Raises ModelError."""
    added = []
    for item in raw.array("added_tokens", dict, MAX_ADDED):
        entry = Fields(item, f"{raw.source}: added_tokens")
        token = AddedToken(
            id=entry.integer("id", low=0),
            content=entry.text("content"),
            special=entry.boolean("special", False),
            normalized=entry.boolean("normalized", True),
            lstrip=entry.boolean("lstrip", False),
            rstrip=entry.boolean("rstrip", False),
        )
        if not token.content:
            raise entry.fail("content", "is empty")
        if token.id >= len(table) or table[token.id] not in (None, token.content):
            raise _bad_id(raw, "added_tokens", table, token.content, token.id)
        table[token.id] = token.content
        added.append(token)
    return added


def with_embedding_rows(raw: Fields, settings: Fields, template: ChatTemplate | None, vocab_size: int) -> Fields:
    """Return `raw` without the special tokens right after the last embedding row, unless the model uses them."""
    # Gemma 3 1B and 270M and EmbeddingGemma have <image_soft_token> there, because the larger versions read images.
    # Without a special token its text is plain characters, so an end token or one of the template stays an error.
    named = special_tokens_map(settings)
    ends = {named.get("bos_token"), named.get("eos_token")}
    added, count = raw.array("added_tokens", dict, MAX_ADDED), vocab_size
    with_rows = []
    for token in added:
        content = token.get("content")
        used = content in ends or (template is not None and template.contains(str(content)))
        if type(content) is str and token.get("id") == count and token.get("special") is True and not used:
            count += 1
        else:
            with_rows.append(token)
    return raw if count == vocab_size else Fields({**raw.values, "added_tokens": with_rows}, raw.source)


def read_tokenizer(folder: Path) -> tuple[Fields, bytes]:
    """Return tokenizer.json, or tekken.json converted to it, parsed and as bytes. Raises ModelError."""
    path = tekken.tokenizer_file(folder)
    if not path.exists() and (folder / SENTENCEPIECE).is_file():
        # As of InternLM 2: transformers has no class for its tokenizer.
        has_code = read_tokenizer_settings(folder).has("auto_map")
        options, risk = (", trust_remote_code=True", ", which runs the model's code") if has_code else ("", "")
        raise ModelError(
            f"tokenizer.json: no such file in {folder}, only {SENTENCEPIECE} (SentencePiece)",
            f"write it with transformers: AutoTokenizer.from_pretrained(FOLDER{options}).save_pretrained(FOLDER){risk};"
            " or use a version of the model that has it",
        )
    data = read_bytes(path, MAX_FILE_BYTES)
    with gc_paused():  # half of the parser's time: hundreds of thousands of small objects
        raw = parse_object(data, path.name, MAX_FILE_BYTES)
        if path.name == tekken.TEKKEN_FILE:
            raw = Fields(tekken.tekken_to_json(raw), path.name)
            data = json.dumps(raw.values, ensure_ascii=False).encode()
    return raw, data


def read_tokenizer_settings(folder: Path) -> Fields:
    """Return tokenizer_config.json, empty without the file; with tekken.json, with the names of its special tokens."""
    path = folder / "tokenizer_config.json"
    settings = read_object(path, MAX_CONFIG_BYTES) if path.exists() else Fields({}, path.name)
    if tekken.tokenizer_file(folder).name == tekken.TEKKEN_FILE:
        settings = Fields({**tekken.SPECIAL_NAMES, **settings.values}, path.name)
    return settings
