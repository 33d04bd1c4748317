"""Turns tokenizer.json into GGUF metadata, the inverse of `runtime.tokenizer.gguf_tokenizer`.

Only byte-level BPE with a pre-tokenizer that llama.cpp has a name for; any other is refused.
"""

from collections.abc import Mapping
from typing import Any

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.gguf_tokenizer import CONTROL, NORMAL, SPECIAL_IDS, UNUSED, USER, ggml_key
from mycli.runtime.tokenizer.split_patterns import PRE_TOKENIZERS
from mycli.runtime.tokenizer.tokenizer import MAX_TOKENS
from mycli.runtime.utils.json_fields import Fields


def _unsupported(reason: str) -> ModelError:
    return ModelError(
        f"tokenizer.json: {reason}, which cannot be written as GGUF", "llama.cpp's own converter may support the model"
    )


def tokenizer_metadata(raw: Fields, settings: Fields, rows: int) -> dict[str, Any]:
    """Return the `tokenizer.*` keys, except the chat template, for a model with `rows` embeddings.

    Raises ModelError for a tokenizer that GGUF cannot hold.
    """
    model = raw.object("model")
    vocabulary = model.values.get("vocab")
    if model.text("type", "BPE") != "BPE" or not isinstance(vocabulary, dict) or model.boolean("byte_fallback", False):
        raise _unsupported("the model is not byte-level BPE")
    whole = model.boolean("ignore_merges", False)
    steps = [{key: raw.values.get(key) for key in ("normalizer", "pre_tokenizer")}]
    name = next(
        (n for n, rule in PRE_TOKENIZERS.items() if rule.ignore_merges == whole and _same(rule.sections(), steps[0])),
        None,
    )
    if name is None:
        raise _unsupported("normalizer and pre-tokenizer are not a rule of llama.cpp")
    tokens = [f"[PAD{index}]" for index in range(rows)]
    types = [UNUSED] * rows
    for text, index in vocabulary.items():
        tokens[index], types[index] = text, NORMAL
    for token in raw.array("added_tokens", dict):
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise _unsupported(f"the token {token['content']!r:.60} strips spaces or matches whole words")
        tokens[token["id"]], types[token["id"]] = token["content"], CONTROL if token.get("special") else USER
    pairs: list[Any] = model.array("merges", object, MAX_TOKENS)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
    keys: dict[str, Any] = {
        ggml_key("model"): "gpt2",
        ggml_key("pre"): name,
        ggml_key("tokens"): tokens,
        ggml_key("token_type"): types,
        ggml_key("merges"): merges,
    }
    added = _added_ends(raw)
    for part in ("bos", "eos"):
        keys[ggml_key(f"add_{part}_token")] = part in added
    for setting, key in SPECIAL_IDS.items():
        value = settings.values.get(setting)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in tokens:
            keys[ggml_key(f"{key}_token_id")] = tokens.index(text)
    return keys


def _same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    # Nested sequences are flattened: one with a single step equals that step.
    return _flat(ours["normalizer"], "normalizers") == _flat(theirs["normalizer"], "normalizers") and _flat(
        ours["pre_tokenizer"], "pretokenizers"
    ) == _flat(theirs["pre_tokenizer"], "pretokenizers")


def _flat(part: Any, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [step for child in part.get(key, []) for step in _flat(child, key)]
    if part.get("type") == "ByteLevel":  # offsets do not change tokens
        return [{"add_prefix_space": True, "use_regex": True, **part, "trim_offsets": None}]
    return [part]


def _added_ends(raw: Fields) -> set[str]:
    # Which of "bos" and "eos" the post-processor adds to a text; GGUF has no key for anything else.
    part = raw.values.get("post_processor")
    steps = _flat(part, "processors")
    ends: set[str] = set()
    for step in steps:
        if step.get("type") == "ByteLevel":
            continue
        if step.get("type") != "TemplateProcessing":
            raise _unsupported(f"the post-processor {step.get('type')!r:.40}")
        pieces = ["SpecialToken" if "SpecialToken" in piece else "text" for piece in step["single"]]
        if pieces.count("text") != 1 or len(pieces) > 3 or pieces.index("text") > 1:
            raise _unsupported("the post-processor adds more than one token before and one after a text")
        at = pieces.index("text")
        ends |= ({"bos"} if at else set()) | ({"eos"} if at + 1 < len(pieces) else set())
    return ends
