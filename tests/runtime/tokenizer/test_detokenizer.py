"""Test token bytes: SentencePiece decoders against the library's own, byte tokens, and refused decoders."""

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.detokenizer import Detokenizer, byte_alphabet
from mycli.runtime.tokenizer.stream import StreamDecoder

REPLACE: dict[str, Any] = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
BYTE: dict[str, Any] = {"type": "ByteFallback"}
FUSE: dict[str, Any] = {"type": "Fuse"}
STRIP: dict[str, Any] = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
LLAMA2 = {"type": "Sequence", "decoders": [REPLACE, BYTE, FUSE, STRIP]}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
NEVER = METASPACE | {"prepend_scheme": "never"}
WORDS = {"type": "WordPiece", "prefix": "##", "cleanup": True}
PIECES = ["▁", "▁▁", "a", "▁b", "é", "🎉", "<s>", "x▁y", *(f"<0x{byte:02X}>" for byte in range(256))]


def decode(decoder: Any, ids: list[int], hidden: frozenset[int] = frozenset()) -> str:
    pieces = Detokenizer(PIECES, hidden, decoder)
    stream = StreamDecoder(pieces)
    return "".join([stream.feed(token_id) for token_id in ids]) + stream.flush()


LIBRARY = {
    "llama2": (
        LLAMA2,
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    ),
    "metaspace": (METASPACE, decoders.Metaspace("▁", "always")),
    "metaspace-never": (NEVER, decoders.Metaspace("▁", "never")),
}

WORD_PIECES = ["a", "##b", "##", ".", "##.", "n't", "'s", "x##y", "##n't", "é", "-", ",", "do", "not", "?!"]


@pytest.mark.parametrize("cleanup", [True, False])
@given(ids=st.lists(st.integers(0, len(WORD_PIECES) - 1), max_size=12))
def test_word_pieces_as_the_library(cleanup: bool, ids: list[int]) -> None:
    pieces = Detokenizer(WORD_PIECES, frozenset(), WORDS | {"cleanup": cleanup})
    ours = b"".join(pieces.piece(token_id, first=not at) or b"" for at, token_id in enumerate(ids))
    assert ours.decode() == decoders.WordPiece("##", cleanup).decode([WORD_PIECES[token_id] for token_id in ids])


@pytest.mark.parametrize("name", LIBRARY)
@given(ids=st.lists(st.integers(0, 7), max_size=12))
def test_as_the_library(name: str, ids: list[int]) -> None:
    ours, theirs = LIBRARY[name]
    assert decode(ours, ids) == theirs.decode([PIECES[token_id] for token_id in ids])


@given(st.text(), st.text())
def test_byte_tokens_of_valid_text(before: str, after: str) -> None:
    ids = [8 + byte for byte in before.encode()] + [2] + [8 + byte for byte in after.encode()]
    theirs = LIBRARY["llama2"][1].decode([PIECES[token_id] for token_id in ids])
    assert decode(LLAMA2, ids) == theirs == (before + "a" + after).removeprefix(" ")


def test_the_characters_of_bytes_are_those_of_gpt_2() -> None:
    assert byte_alphabet() == {character: byte for byte, character in bytes_to_unicode().items()}


def test_invalid_byte_token_damages_only_itself() -> None:  # C19: the library makes three of this
    assert decode(LLAMA2, [8 + 0xC3, 8 + 0xA9, 8 + 0xFF, 2]) == "é\ufffda"


def test_hidden_and_unknown_ids_show_nothing() -> None:
    assert decode(LLAMA2, [6, 3, 999, 2], frozenset((6,))) == "ba"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": ""},
        {"type": "Sequence", "decoders": []},
        {"type": "Sequence", "decoders": [REPLACE, STRIP]},
        {"type": "Sequence", "decoders": [FUSE, STRIP | {"stop": 1}]},
        {"type": "Sequence", "decoders": [REPLACE | {"pattern": {"Regex": "▁"}}]},
        {"type": "Sequence", "decoders": [REPLACE | {"content": " " * 9}]},
        {"type": "Sequence", "decoders": [REPLACE | {"pattern": {"String": "a"}, "content": "aaa"}] * 2},
        {"type": "Sequence", "decoders": [FUSE, STRIP | {"start": None}]},
        {"type": "Sequence", "decoders": [FUSE, STRIP | {"start": "x"}]},
        {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, FUSE]},
    ],
    ids=str,
)
def test_unsupported_decoder(decoder: Any) -> None:
    with pytest.raises(ModelError, match="decoder"):
        Detokenizer(PIECES, frozenset(), decoder)


def test_replacements_may_lengthen_a_token_to_8_times() -> None:
    doubled = REPLACE | {"pattern": {"String": "a"}, "content": "aa"}
    ours = Detokenizer(["a"], frozenset(), {"type": "Sequence", "decoders": [doubled] * 3})
    assert ours.piece(0, first=False) == b"a" * 8


def test_library_version_still_splits_words_as_assumed() -> None:
    """The prefix space of SentencePiece belongs to the start of a text, not to what follows a control token."""
    from mycli.runtime.tokenizer.backend import Pipeline

    vocab = {piece: index for index, piece in enumerate(["▁", "a", "b", "<", ">", "<c>", "▁a"])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("▁", "a")]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace("▁", "first")  # type: ignore[assignment]  # untyped setter
    model.add_special_tokens([tokenizers.AddedToken("<c>", special=True)])
    pipeline = Pipeline(model.to_str().encode())
    assert pipeline.encode("a", False, plain=True, inside=False) == [6]
    assert pipeline.encode("a", False, plain=True, inside=True) == [1]
    assert pipeline.encode("<c>a", False, plain=False, inside=False) == [5, 1]


def test_a_text_after_a_flush_has_no_space_in_front() -> None:
    stream = StreamDecoder(Detokenizer(PIECES, frozenset(), METASPACE))
    assert [stream.feed(3), stream.flush(), stream.feed(3)] == ["b", "", "b"]
