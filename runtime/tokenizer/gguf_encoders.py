"""The tokenizer.json sections of encoders in GGUF files: WordPiece, and the Unigram vocabularies of XLM-RoBERTa."""

from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from mycli.runtime.tokenizer.gguf_vocabulary import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    added_tokens,
    ggml_key,
    read_tokens,
    token_id,
    token_numbers,
    vocabulary_ids,
)
from mycli.runtime.utils.json_fields import Fields

_SPACE = "▁"
_ENDS = (("cls", "bos"), ("seperator", "eos"))  # keys of an encoder's tokens around a text; the first is newer


def between_ends(metadata: Fields, tokens: Sequence[str], texts: Sequence[str]) -> dict[str, Any]:
    """Return the post-processor of an encoder; texts: its tokens around a text, where the file does not give their ids.

    As in BERT the tokens of a pair have types, as in RoBERTa there are two tokens between its texts.
    """
    special: dict[str, Any] = {}
    pieces: list[dict[str, Any]] = []
    for text, keys in zip(texts, _ENDS, strict=True):
        ids = (token_id(metadata, key, len(tokens)) for key in keys)
        index = next((index for index in ids if index is not None), None)
        if index is None and text not in tokens:
            raise metadata.fail(ggml_key(f"{keys[0]}_token_id"), f"is missing, and there is no token {text}")
        index = tokens.index(text) if index is None else index
        special[tokens[index]] = {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]}
        pieces.append({"SpecialToken": {"id": tokens[index], "type_id": 0}})
    start, end = pieces
    single = [start, {"Sequence": {"id": "A", "type_id": 0}}, end]
    if texts[0] == "<s>":
        pair = [*single, end, {"Sequence": {"id": "B", "type_id": 0}}, end]
    else:
        second = {"SpecialToken": {**end["SpecialToken"], "type_id": 1}}
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}, second]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def unigram(metadata: Fields) -> dict[str, Any]:
    tokens, types = read_tokens(metadata)
    scores = token_numbers(metadata, "scores", len(tokens), float)
    unknown = token_id(metadata, "unknown", len(tokens))
    if unknown is None:
        unknown = types.index(UNKNOWN) if UNKNOWN in types else None
    charsmap = metadata.values.get(ggml_key("precompiled_charsmap"))
    if charsmap is not None and not (isinstance(charsmap, array) and charsmap.itemsize == 1):
        raise metadata.fail(ggml_key("precompiled_charsmap"), "is not a list of bytes")
    prefix = "always" if metadata.boolean(ggml_key("add_space_prefix"), True) else "never"
    spaces = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": prefix, "split": True}
    single = [{"type": "WhitespaceSplit"}] if metadata.boolean(ggml_key("remove_extra_whitespaces"), False) else []
    encoded = None if charsmap is None else b64encode(charsmap.tobytes()).decode()
    return {
        "added_tokens": added_tokens(tokens, types),
        "normalizer": None if encoded is None else {"type": "Precompiled", "precompiled_charsmap": encoded},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*single, spaces]},
        "post_processor": between_ends(metadata, tokens, ("<s>", "</s>")),
        "decoder": spaces,
        "model": {
            **{"type": "Unigram", "unk_id": unknown, "byte_fallback": False},
            "vocab": [list(pair) for pair in zip(tokens, scores, strict=True)],
        },
    }


def word_piece(metadata: Fields) -> dict[str, Any]:
    tokens, types = read_tokens(metadata)
    # Control tokens are stored as they are, in older files all in brackets; of the others those that begin a word are
    # marked in place of those that continue one.
    types = [
        CONTROL if text[:1] == "[" and text[1:].endswith("]") else kind
        for text, kind in zip(tokens, types, strict=True)
    ]
    spelled = [
        text if kind in (CONTROL, UNUSED) else text[1:] if text.startswith(_SPACE) else f"##{text}"
        for text, kind in zip(tokens, types, strict=True)
    ]
    vocabulary = vocabulary_ids(metadata, spelled, types)
    # No key says whether a model is cased, but only the tokens of one that is have capitals.
    lower = not any(kind == NORMAL and text != text.lower() for text, kind in zip(spelled, types, strict=True))
    unknown = token_id(metadata, "unknown", len(tokens))
    return {
        "added_tokens": added_tokens(spelled, types),
        "normalizer": {
            **{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None},
            "lowercase": lower,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": between_ends(metadata, spelled, ("[CLS]", "[SEP]")),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]" if unknown is None else spelled[unknown],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocabulary,
        },
    }
