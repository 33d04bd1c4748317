"""Test the tokenizers of encoders in GGUF files: how words are cut, and the tokens around one text and two."""

import json
from array import array
from base64 import b64decode
from typing import Any

import pytest
import tokenizers

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.gguf_tokenizer import tokenizer_json
from mycli.runtime.utils.json_fields import Fields
from tests.runtime.tokenizer.test_charsmap import UNITS, charsmap

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁the", "▁cat", "s", "▁a", "a", "▁[", "[", "▁]", "]", "▁."]
PIECES = ["<unk>", "<s>", "</s>", "▁▁", "▁", "▁the", "▁cat", "s", "c", "é", "b"]


def metadata(architecture: str, tokens: list[str], types: list[int], **more: Any) -> Fields:
    keys = {"tokens": tokens, "token_type": array("i", types), **more}
    values = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    return Fields({"general.architecture": architecture, **values}, "x.gguf")


def word_piece(tokens: list[str] = WORDS, **more: Any) -> tokenizers.Tokenizer:
    """Build the tokenizer of a BERT whose control tokens have the type of all others, as in older files."""
    keys = {"model": "bert", "cls_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1, **more}
    converted = tokenizer_json(metadata("bert", tokens, [1] * len(tokens), **keys))
    return tokenizers.Tokenizer.from_str(json.dumps(converted))


def unigram(**more: Any) -> tokenizers.Tokenizer:
    scores = array("f", [0.0, 0.0, 0.0, *(-float(index) for index in range(3, len(PIECES)))])
    keys = {"model": "t5", "scores": scores, "unknown_token_id": 0, **more}
    converted = tokenizer_json(metadata("bert", PIECES, [2, 3, 3, *[1] * (len(PIECES) - 3)], **keys))
    return tokenizers.Tokenizer.from_str(json.dumps(converted))


def test_words_are_cut_and_the_tokens_of_a_pair_have_types_as_in_bert() -> None:
    tokenizer = word_piece()
    pair = tokenizer.encode("The cats", "the[SEP]x")
    assert pair.tokens == ["[CLS]", "the", "cat", "##s", "[SEP]", "the", "[SEP]", "[UNK]", "[SEP]"]
    assert pair.type_ids == [0] * 5 + [1] * 4
    single = tokenizer.encode("cats")
    assert (single.tokens, single.type_ids) == (["[CLS]", "cat", "##s", "[SEP]"], [0] * 4)
    assert tokenizer.decode(pair.ids) == "the cats the"
    cut = tokenizer.encode("th\x01e中cat[a].", add_special_tokens=False)
    assert cut.tokens == ["the", "[UNK]", "cat", "[", "a", "]", "."] and tokenizer.decode(cut.ids) == "the cat [ a ]."


@pytest.mark.parametrize(("extra", "pieces"), [([], ["the", "cat"]), (["▁The"], ["The", "[UNK]"])])
def test_only_a_vocabulary_with_capitals_tells_words_with_capitals_apart(extra: list[str], pieces: list[str]) -> None:
    assert word_piece([*WORDS, *extra]).encode("The CAT", add_special_tokens=False).tokens == pieces


def test_a_word_of_more_than_100_letters_is_unknown() -> None:
    cut = [word_piece().encode("a" * count, add_special_tokens=False).tokens for count in (100, 101)]
    assert cut == [["a", *["##a"] * 99], ["[UNK]"]]


@pytest.mark.parametrize(
    ("keys", "ends"),
    [
        ({}, ["[CLS]", "[SEP]"]),
        ({"bos_token_id": 0, "eos_token_id": 0}, ["[CLS]", "[SEP]"]),  # older keys, which the newer ones precede
        ({"cls_token_id": None, "seperator_token_id": None, "bos_token_id": 3, "eos_token_id": 0}, ["[SEP]", "[PAD]"]),
        ({"cls_token_id": None, "seperator_token_id": None}, ["[CLS]", "[SEP]"]),  # by their texts
        ({"cls_token_id": 0}, ["[PAD]", "[SEP]"]),
    ],
    ids=["newer", "both", "older", "none", "first"],
)
def test_the_tokens_around_a_text_are_those_of_the_file(keys: dict[str, Any], ends: list[str]) -> None:
    assert word_piece(**keys).encode("the").tokens == [ends[0], "the", ends[1]]


def test_a_file_without_a_token_for_the_end_of_a_text_is_refused() -> None:
    tokens = [text.replace("[SEP]", "[END]") for text in WORDS]
    with pytest.raises(ModelError, match=r"seperator_token_id is missing, and there is no token \[SEP\]"):
        word_piece(tokens, seperator_token_id=None)


@pytest.mark.parametrize("key", [1, 0, None])
def test_the_unknown_token_of_a_word(key: int | None) -> None:
    expected = "[UNK]" if key is None else WORDS[key]
    assert word_piece(unknown_token_id=key).encode("x", add_special_tokens=False).tokens == [expected]


def test_texts_of_a_unigram_vocabulary_have_two_tokens_between_them_as_in_roberta() -> None:
    pair = unigram().encode("the cats", "the")
    assert pair.tokens == ["<s>", "▁the", "▁cat", "s", "</s>", "</s>", "▁the", "</s>"]
    assert pair.type_ids == [0] * 8
    assert unigram().decode(pair.ids) == "the cats the"
    assert unigram().encode("the").tokens == ["<s>", "▁the", "</s>"]


@pytest.mark.parametrize(
    ("keys", "pieces"),
    [
        ({}, ["▁the", "▁", "▁", "c"]),
        ({"add_space_prefix": False}, ["the", "▁", "▁", "c"]),
        ({"remove_extra_whitespaces": True}, ["▁the", "▁", "c"]),
    ],
    ids=["default", "no-prefix", "single-spaces"],
)
def test_spaces_of_a_unigram_vocabulary(keys: dict[str, Any], pieces: list[str]) -> None:
    assert unigram(**keys).encode("the  c", add_special_tokens=False).tokens == pieces


@pytest.mark.parametrize(("key", "unknown"), [(0, 0), (3, 3), (None, 0)], ids=["key", "another", "by-type"])
def test_the_unknown_token_of_a_unigram_vocabulary(key: int | None, unknown: int) -> None:
    assert unigram(unknown_token_id=key).encode("cЖ", add_special_tokens=False).ids == [4, 8, unknown]


@pytest.mark.parametrize("kind", ["b", "B"])
def test_a_map_of_characters_is_applied_before_a_text_is_cut(kind: str) -> None:
    data = array(kind, b64decode(charsmap(UNITS)))
    assert unigram(precompiled_charsmap=data).encode("A", add_special_tokens=False).tokens[1:] == ["é", "b", "c"]
    for damaged in (array("h", [1, 2]), "text"):
        with pytest.raises(ModelError, match="precompiled_charsmap is not a list of bytes"):
            unigram(precompiled_charsmap=damaged)
