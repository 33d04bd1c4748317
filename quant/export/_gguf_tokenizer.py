"""A tokenizer.json as the metadata of a GGUF file: the inverse of `runtime.tokenizer.gguf_tokenizer`.

Byte-level BPE only, cut by a rule that llama.cpp has a name for; anything else is refused.
"""

from collections.abc import Mapping
from typing import Any

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.gguf_tokenizer import CONTROL, NORMAL, SPECIAL_IDS, UNUSED, USER, ggml_key
from mycli.runtime.tokenizer.split_patterns import PRE_TOKENIZERS
from mycli.runtime.tokenizer.tokenizer import MAX_TOKENS
from mycli.runtime.utils.json_fields import Fields


def _unsupported(reason: str) -> ModelError:
    """The error for a tokenizer that no GGUF file can hold."""
    return ModelError(f"tokenizer.json: {reason}", "llama.cpp has no rule for it; its own converter may know the model")


def tokenizer_metadata(raw: Fields, settings: Fields, rows: int) -> dict[str, Any]:
    """The inverse: `tokenizer.*` keys for a tokenizer.json of a model of `rows` embeddings, without the template.

    Byte-level BPE only, cut by a rule that llama.cpp names. Raises ModelError for any other.
    """
    model = raw.object("model")
    vocabulary = model.values.get("vocab")
    if model.text("type", "BPE") != "BPE" or not isinstance(vocabulary, dict) or model.boolean("byte_fallback", False):
        raise _unsupported("not byte-level BPE")
    whole = model.boolean("ignore_merges", False)
    steps = [{key: raw.values.get(key) for key in ("normalizer", "pre_tokenizer")}]
    name = next(
        (n for n, rule in PRE_TOKENIZERS.items() if rule.ignore_merges == whole and _same(rule.sections(), steps[0])),
        None,
    )
    if name is None:
        raise _unsupported("it cuts text by a rule of its own")
    tokens = [f"[PAD{index}]" for index in range(rows)]
    types = [UNUSED] * rows
    for text, index in vocabulary.items():
        tokens[index], types[index] = text, NORMAL
    for token in raw.array("added_tokens", dict):
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise _unsupported(f"the token {token['content']!r:.60} takes the spaces around it")
        tokens[token["id"]], types[token["id"]] = token["content"], CONTROL if token.get("special") else USER
    pairs: list[Any] = model.array("merges", object, MAX_TOKENS)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
    found: dict[str, Any] = {
        ggml_key("model"): "gpt2",
        ggml_key("pre"): name,
        ggml_key("tokens"): tokens,
        ggml_key("token_type"): types,
        ggml_key("merges"): merges,
    }
    wrapped = _wrapped(raw)
    for part in ("bos", "eos"):
        found[ggml_key(f"add_{part}_token")] = part in wrapped
    for setting, key in SPECIAL_IDS.items():
        value = settings.values.get(setting)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in tokens:
            found[ggml_key(f"{key}_token_id")] = tokens.index(text)
    return found


def _same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether two pairs of sections cut text in the same way: a sequence of one is that one, and order is kept."""
    return _flat(ours["normalizer"], "normalizers") == _flat(theirs["normalizer"], "normalizers") and _flat(
        ours["pre_tokenizer"], "pretokenizers"
    ) == _flat(theirs["pre_tokenizer"], "pretokenizers")


def _flat(part: Any, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [step for child in part.get(key, []) for step in _flat(child, key)]
    if part.get("type") == "ByteLevel":  # offsets are nobody's concern here
        return [{"add_prefix_space": True, "use_regex": True, **part, "trim_offsets": None}]
    return [part]


def _wrapped(raw: Fields) -> set[str]:
    """Which of "bos" and "eos" the post-processor puts around a text. Raises ModelError for anything else it does."""
    part = raw.values.get("post_processor")
    steps = _flat(part, "processors")
    found: set[str] = set()
    for step in steps:
        if step.get("type") == "ByteLevel":
            continue
        if step.get("type") != "TemplateProcessing":
            raise _unsupported(f"the post-processor {step.get('type')!r:.40}")
        pieces = ["SpecialToken" if "SpecialToken" in piece else "text" for piece in step["single"]]
        if pieces.count("text") != 1 or len(pieces) > 3 or pieces.index("text") > 1:
            raise _unsupported("it puts more than a start and an end token around a text")
        at = pieces.index("text")
        found |= ({"bos"} if at else set()) | ({"eos"} if at + 1 < len(pieces) else set())
    return found
