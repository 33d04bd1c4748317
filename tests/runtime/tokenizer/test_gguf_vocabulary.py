"""Test the vocabulary of a GGUF file: types of tokens, ids by key, and lists that do not fit each other."""

from array import array
from typing import Any

import pytest

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.gguf_vocabulary import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER,
    added_tokens,
    read_tokens,
    token_id,
    token_numbers,
    vocabulary_ids,
)
from mycli.runtime.utils.json_fields import Fields

TOKENS = ["a", "<|im_end|>", "b"]


def fields(**keys: Any) -> Fields:
    return Fields({f"tokenizer.ggml.{key}": value for key, value in keys.items()}, "x.gguf")


def test_tokens_have_the_types_of_the_file_except_known_ends() -> None:
    typed = fields(tokens=TOKENS, token_type=array("i", [NORMAL, NORMAL, USER]))
    assert read_tokens(typed) == (TOKENS, [NORMAL, CONTROL, USER])
    assert read_tokens(fields(tokens=TOKENS)) == (TOKENS, [NORMAL] * 3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "tokens is missing or empty"),
        ({"tokens": []}, "tokens is missing or empty"),
        ({"tokens": ["a", "b" * 2000, "c"]}, "holds a token of 2000 characters"),
        ({"tokens": TOKENS, "token_type": array("i", [1, 1])}, "token_type must be 3 integers"),
        ({"tokens": TOKENS, "token_type": array("f", [1, 1, 1])}, "token_type must be 3 integers"),
        ({"tokens": TOKENS, "token_type": "111"}, "token_type must be 3 integers"),
    ],
    ids=["missing", "empty", "long", "few-types", "floats", "text"],
)
def test_damaged_lists_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_tokens(fields(**keys))


def test_numbers_beyond_the_tokens_are_left_out() -> None:
    scores = fields(scores=array("f", [0.5, 1.0, 2.0, 3.0]))
    assert token_numbers(scores, "scores", 3, float) == [0.5, 1.0, 2.0]
    assert token_numbers(scores, "scores", 4, float) == [0.5, 1.0, 2.0, 3.0]
    with pytest.raises(ModelError, match="scores must be 5 floats"):
        token_numbers(scores, "scores", 5, float)
    with pytest.raises(ModelError, match="scores must be 3 floats"):
        token_numbers(fields(scores=array("i", [1, 2, 3])), "scores", 3, float)


@pytest.mark.parametrize(("stored", "index"), [(0, 0), (2, 2), ((1 << 32) - 1, None), (None, None)])
def test_the_id_of_a_key(stored: int | None, index: int | None) -> None:
    """Some converters write -1, as an unsigned number, for no token."""
    assert token_id(fields(bos_token_id=stored) if stored is not None else fields(), "bos", 3) == index


@pytest.mark.parametrize("stored", [3, (1 << 32) - 2, 1 << 32, -1])
def test_an_id_of_no_token_is_refused(stored: int) -> None:
    with pytest.raises(ModelError, match="bos_token_id"):
        token_id(fields(bos_token_id=stored), "bos", 3)


def test_control_tokens_and_those_of_users_are_added() -> None:
    added = added_tokens(["a", "<c>", "<u>", "", "<x>"], [NORMAL, CONTROL, USER, CONTROL, UNUSED])
    assert [(token["id"], token["content"], token["special"]) for token in added] == [
        (1, "<c>", True),
        (2, "<u>", False),
    ]
    assert not any(token[flag] for token in added for flag in ("single_word", "lstrip", "rstrip", "normalized"))


def test_a_token_has_one_id_and_padding_none() -> None:
    tokens, types = ["a", "<pad>", "b", "<pad>", "", ""], [NORMAL, UNUSED, NORMAL, UNUSED, NORMAL, CONTROL]
    assert vocabulary_ids(fields(), tokens, types) == {"a": 0, "b": 2}
    with pytest.raises(ModelError, match="holds 'a' twice, as 0 and 2"):
        vocabulary_ids(fields(), ["a", "b", "a"], [NORMAL] * 3)
