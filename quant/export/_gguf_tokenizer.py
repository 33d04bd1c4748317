"""Turns tokenizer.json into GGUF metadata, the inverse of `runtime.tokenizer.gguf_tokenizer`.

Byte-level BPE with a pre-tokenizer that llama.cpp has a name for, and SentencePiece's BPE; any other is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mycli.quant.export._gguf_sentencepiece import (
    flat_steps,
    is_sentencepiece,
    plain_added_tokens,
    require_embedding_rows,
    sentencepiece_metadata,
    unsupported,
)
from mycli.runtime.tokenizer.chat_template import special_tokens_map
from mycli.runtime.tokenizer.fill_in_middle import FIM_NAMES, find_fim_tokens
from mycli.runtime.tokenizer.gguf_tokenizer import FIM_IDS, SPECIAL_IDS
from mycli.runtime.tokenizer.gguf_vocabulary import CONTROL, NORMAL, UNUSED, USER, ggml_key
from mycli.runtime.tokenizer.split_patterns import PRE_TOKENIZERS
from mycli.runtime.tokenizer.tokenizer_files import MAX_TOKENS
from mycli.runtime.utils.json_fields import Fields


def tokenizer_metadata(raw: Fields, settings: Fields, rows: int, architecture: str = "") -> dict[str, Any]:
    """Return the `tokenizer.*` keys, except the chat template, for a model with `rows` embeddings.

    Raises ModelError for a tokenizer that GGUF cannot hold.
    """
    if is_sentencepiece(raw):
        keys = sentencepiece_metadata(raw, rows, "gemma4" if architecture == "gemma4" else "llama")
    else:
        keys = _byte_level(raw, rows)
    return {**keys, **_special_tokens(raw, settings, keys[ggml_key("tokens")])}


def _byte_level(raw: Fields, rows: int) -> dict[str, Any]:
    model = raw.object("model")
    vocabulary = model.values.get("vocab")
    if model.text("type", "BPE") != "BPE" or not isinstance(vocabulary, dict):
        raise unsupported("the model is not byte-level BPE")
    whole = model.boolean("ignore_merges", False)
    require_embedding_rows(vocabulary, rows)
    steps = [{key: raw.values.get(key) for key in ("normalizer", "pre_tokenizer")}]
    rules = ((name, rule) for name, rule in PRE_TOKENIZERS.items() if rule.ignore_merges == whole)
    name = next(
        (name for name, rule in rules if any(_same(rule.sections(published), steps[0]) for published in (True, False))),
        None,
    )
    if name is None:
        raise unsupported("normalizer and pre-tokenizer are not a rule of llama.cpp")
    tokens = [f"[PAD{index}]" for index in range(rows)]
    types = [UNUSED] * rows
    for text, index in vocabulary.items():
        tokens[index], types[index] = text, NORMAL
    for token in plain_added_tokens(raw, rows):
        tokens[token["id"]], types[token["id"]] = token["content"], CONTROL if token.get("special") else USER
    pairs: list[Any] = model.array("merges", object, MAX_TOKENS)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
    return {
        ggml_key("model"): "gpt2",
        ggml_key("pre"): name,
        ggml_key("tokens"): tokens,
        ggml_key("token_type"): types,
        ggml_key("merges"): merges,
    }


def _special_tokens(raw: Fields, settings: Fields, tokens: Sequence[str]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    added = _added_ends(raw)
    for part in ("bos", "eos"):
        keys[ggml_key(f"add_{part}_token")] = part in added
    for setting, key in SPECIAL_IDS.items():
        value = settings.values.get(setting)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in tokens:
            keys[ggml_key(f"{key}_token_id")] = tokens.index(text)
    return keys | _fim_ids(special_tokens_map(settings, FIM_NAMES), tokens)


def _fim_ids(names: Mapping[str, str], tokens: Sequence[str]) -> dict[str, int]:
    fim = find_fim_tokens(tokens, names)
    if fim is None:
        return {}
    ids = (fim.prefix, fim.suffix, fim.middle, fim.pad, fim.repository, fim.file)
    keys = (ggml_key(f"{FIM_IDS[name][0]}_token_id") for name in FIM_NAMES)
    return {key: index for key, index in zip(keys, ids, strict=True) if index is not None}


def _same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    # Nested sequences are flattened: one with a single step equals that step.
    return flat_steps(ours["normalizer"], "normalizers") == flat_steps(
        theirs["normalizer"], "normalizers"
    ) and flat_steps(ours["pre_tokenizer"], "pretokenizers") == flat_steps(theirs["pre_tokenizer"], "pretokenizers")


def _added_ends(raw: Fields) -> set[str]:
    # Which of "bos" and "eos" the post-processor adds to a text; GGUF has no key for anything else.
    part = raw.values.get("post_processor")
    steps = flat_steps(part, "processors")
    ends: set[str] = set()
    for step in steps:
        if step.get("type") == "ByteLevel":
            continue
        if step.get("type") != "TemplateProcessing":
            raise unsupported(f"the post-processor {step.get('type')!r:.40}")
        pieces = ["SpecialToken" if "SpecialToken" in piece else "text" for piece in step["single"]]
        if pieces.count("text") != 1 or "text" not in pieces[:2] or "text" not in pieces[-2:]:
            raise unsupported("the post-processor adds more than one token before and one after a text")
        ends |= ({"bos"} if pieces[0] != "text" else set()) | ({"eos"} if pieces[-1] != "text" else set())
    return ends
