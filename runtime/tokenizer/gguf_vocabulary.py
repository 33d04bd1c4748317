"""The vocabulary in the tokenizer metadata of a GGUF file: tokens, their types, ids by key, and added tokens."""

from array import array
from collections.abc import Sequence
from typing import Any

from mycli.runtime.utils.json_fields import Fields

MAX_GGUF_TOKENS = 1 << 22
_MAX_TOKEN_CHARACTERS = 1024
_NO_TOKEN = (1 << 32) - 1  # -1, written by some converters
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # `tokenizer.ggml.token_type`
# Tokens that end a reply whatever their key and type: llama.cpp finds them by their text, too.
EOS_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "<end_of_utterance>"),
        *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<｜end▁of▁sentence｜>", "[e~["),
    )
)
SUPPORTED_KINDS = (
    "supported: byte-level BPE (gpt2), SentencePiece BPE (llama), gemma4, WordPiece (bert), Unigram of BERT"
)


def ggml_key(name: str) -> str:
    return f"tokenizer.ggml.{name}"


def read_tokens(metadata: Fields) -> tuple[list[str], list[int]]:
    """Return the tokens by id and their types, CONTROL for known ends. Raises ModelError for mismatched lists."""
    tokens = metadata.array(ggml_key("tokens"), str, MAX_GGUF_TOKENS)
    if not tokens:
        raise metadata.fail(ggml_key("tokens"), "is missing or empty", SUPPORTED_KINDS)
    types = [NORMAL] * len(tokens)
    if metadata.values.get(ggml_key("token_type")) is not None:
        stored = token_numbers(metadata, "token_type", len(tokens), int)
        types = [CONTROL if text in EOS_TEXTS else kind for text, kind in zip(tokens, stored, strict=True)]
    longest = max(map(len, tokens))
    if longest > _MAX_TOKEN_CHARACTERS:
        raise metadata.fail(ggml_key("tokens"), f"holds a token of {longest} characters")
    return tokens, types


def token_numbers(metadata: Fields, name: str, count: int, kind: type) -> list[Any]:
    """Return `tokenizer.ggml.NAME`, a number of type `kind` for each token. Raises ModelError if it is not that."""
    values = metadata.values.get(ggml_key(name))
    if not isinstance(values, array) or len(values) < count or (values.typecode in "fd") != (kind is float):
        kinds = "floats" if kind is float else "integers"
        raise metadata.fail(ggml_key(name), f"must be {count} {kinds}, one for each token")
    return [kind(value) for value in values[:count]]


def token_id(metadata: Fields, name: str, count: int) -> int | None:
    """Return the id `tokenizer.ggml.NAME_token_id`, or None. Raises ModelError for an id beyond the tokens."""
    key = ggml_key(f"{name}_token_id")
    if not metadata.has(key):
        return None
    value = metadata.integer(key, low=0, high=_NO_TOKEN)
    if value == _NO_TOKEN:
        return None
    if value >= count:
        raise metadata.fail(key, f"= {value} is not one of the {count} tokens")
    return value


def added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Return the control and user-defined tokens as `added_tokens` of a tokenizer.json."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": text, **flags, "special": kind == CONTROL}
        for index, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER) and text
    ]


def vocabulary_ids(metadata: Fields, tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Return the id of each token. Raises ModelError for a token that occurs twice."""
    vocabulary: dict[str, int] = {}
    for index, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == UNUSED or not text:  # padding
            continue
        if text in vocabulary:
            raise metadata.fail(ggml_key("tokens"), f"holds {text!r:.60} twice, as {vocabulary[text]} and {index}")
        vocabulary[text] = index
    return vocabulary
