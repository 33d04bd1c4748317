"""Turns a SentencePiece tokenizer.json into GGUF metadata, the inverse of `sentencepiece_bpe`.

llama.cpp joins the pair of pieces whose joined token has the best score; tokenizer.json ranks the pairs. Both agree if
every way of cutting a token in two is a merge, and all merges into a token have neighbouring ranks, as where the merges
were derived from scores. Other tokenizers are refused. Gemma 4 has its merges in the file.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.gguf_bpe import derived_merges
from mycli.runtime.tokenizer.gguf_vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER, ggml_key
from mycli.runtime.tokenizer.tokenizer_files import MAX_TOKENS
from mycli.runtime.utils.json_fields import Fields

_SPACE = "▁"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_ADDED_SCORE, _UNUSED_SCORE = -1000.0, -10000.0  # those of llama.cpp's converter
_RUN_SCORE = -1e9  # of repeated spaces, in published models
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
# Gemma's; it changes nothing, because the normalizer has replaced the spaces.
_CUT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


def is_sentencepiece(raw: Fields) -> bool:
    model = raw.object("model")
    return model.text("type", "BPE") == "BPE" and model.boolean("byte_fallback", False)


def sentencepiece_metadata(raw: Fields, rows: int, kind: str) -> dict[str, Any]:
    """Return tokens, types and scores or merges for a model with `rows` embeddings; kind: "llama" or "gemma4".

    Raises ModelError for a tokenizer that llama.cpp would apply differently.
    """
    model = raw.object("model")
    vocabulary = model.values.get("vocab")
    pairs: list[Any] = model.array("merges", object, MAX_TOKENS)
    if not isinstance(vocabulary, dict) or not all(isinstance(index, int) for index in vocabulary.values()):
        raise unsupported("the vocabulary is not an object of ids")
    require_embedding_rows(vocabulary, rows)
    added = {token["id"]: token for token in plain_added_tokens(raw, rows)}
    tokens, types = [f"[PAD{index}]" for index in range(rows)], [UNUSED] * rows
    for text, index in vocabulary.items():
        tokens[index], types[index] = text, BYTE if _BYTE.fullmatch(text) else NORMAL
    for index, token in added.items():
        special = bool(token.get("special"))
        # The file has spaces in tokens that are looked for in the text itself.
        tokens[index] = token["content"] if special else token["content"].replace(_SPACE, " ")
        types[index] = CONTROL if special else USER
    unknown = model.values.get("unk_token")
    if isinstance(unknown, str) and unknown in vocabulary:
        types[vocabulary[unknown]] = UNKNOWN
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in pairs]
    keys: dict[str, Any] = {
        ggml_key("model"): kind,
        ggml_key("pre"): "default" if kind == "llama" else kind,
        ggml_key("tokens"): tokens,
        ggml_key("token_type"): types,
        ggml_key("add_space_prefix"): _prefix(raw),
    }
    if kind == "llama":
        learned = {text: index for text, index in vocabulary.items() if index not in added}
        scores = _scores(learned, vocabulary, merges)
        keys[ggml_key("scores")] = [_score(index, types[index], scores) for index in range(rows)]
    else:
        keys[ggml_key("scores")] = [_ADDED_SCORE] * rows
        keys[ggml_key("merges")] = [" ".join(pair) for pair in merges]
    return keys


def unsupported(reason: str) -> ModelError:
    return ModelError(
        f"tokenizer.json: {reason}, which cannot be written as GGUF", "llama.cpp's own converter may support the model"
    )


def require_embedding_rows(vocabulary: Mapping[str, int], rows: int) -> None:
    text, index = max(vocabulary.items(), key=lambda token: token[1], default=("", -1))
    if index >= rows:
        raise unsupported(f"{text!r:.60} has id {index}, but the model has {rows} embedding rows")


def plain_added_tokens(raw: Fields, rows: int) -> list[dict[str, Any]]:
    # Those with an embedding row, for the tokenizer ignores the others. Raises ModelError for one that GGUF lacks.
    added = [token for token in raw.array("added_tokens", dict) if token["id"] < rows]
    for token in added:
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise unsupported(f"the token {token['content']!r:.60} strips spaces or matches whole words")
    return added


def _score(index: int, kind: int, scores: Mapping[int, float]) -> float:
    if kind == UNUSED:
        return _UNUSED_SCORE
    return scores.get(index, 0.0) if kind in (NORMAL, BYTE, UNKNOWN) else _ADDED_SCORE


def _scores(
    learned: Mapping[str, int], vocabulary: Mapping[str, int], merges: Sequence[tuple[str, ...]]
) -> dict[int, float]:
    """Return scores that decrease in the order of the merges, and then for characters that no merge makes."""
    expected = derived_merges(vocabulary, dict.fromkeys(learned, 0.0))
    missing = {tuple(pair) for pair in expected} - set(merges)
    if missing:
        raise unsupported(f"{' '.join(min(missing))!r:.60} is no merge, but both and what they join are tokens")
    groups = _groups("".join(pair) for pair in merges if "".join(pair) in learned)
    runs: list[str] = []
    if groups and len(groups[-1]) > 1:
        character = groups[-1][0][0]
        runs = [text for text in learned if set(text) == {character}]
    merged = [token for group in groups for token in group if token not in runs]
    known = {*merged, *runs}
    others = [text for text in learned if text not in known and not _BYTE.fullmatch(text)]
    ids = [learned[text] for text in merged]
    if ids == sorted(ids):  # as in SentencePiece's files, where the scores count the ids
        first = min((learned[text] for text in (*merged, *others, *runs)), default=0)
        scores = {learned[text]: float(first - learned[text]) for text in (*merged, *others)}
    else:
        scores = {learned[text]: -float(rank) for rank, text in enumerate((*merged, *others))}
    return {**scores, **{learned[text]: _RUN_SCORE for text in runs}}


def _groups(merged: Iterable[str]) -> list[list[str]]:
    """Return the tokens in the order of their merges; those with merges between each other's are one group.

    Raises ModelError for such a group, except at the end and of repetitions of one character, such as spaces.
    """
    groups: list[list[str]] = []
    place: dict[str, int] = {}
    for token in merged:
        start = place.setdefault(token, len(groups))
        if start == len(groups):
            groups.append([token])
        elif start < len(groups) - 1:
            groups[start:] = [[text for group in groups[start:] for text in group]]
            place.update(dict.fromkeys(groups[start], start))
    for group in groups:
        if len(group) > 1 and (group is not groups[-1] or len(set("".join(group))) > 1):
            raise unsupported(f"merges into {group[0]!r:.60} have ranks with others between them")
    return groups


def _prefix(raw: Fields) -> bool:
    # Whether a text gets a space in front.
    normalizers, pre_tokenizers = (
        flat_steps(raw.values.get(part), key)
        for part, key in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"))
    )
    pre_tokenizers = [step for step in pre_tokenizers if step != _CUT]
    if not pre_tokenizers and normalizers in ([_REPLACE], [_PREPEND, _REPLACE]):
        return len(normalizers) == 2
    if not normalizers and len(pre_tokenizers) == 1 and pre_tokenizers[0].get("type") == "Metaspace":
        step = pre_tokenizers[0]
        if step.get("replacement") == _SPACE and not step.get("split", True):
            # After a special token llama.cpp adds a space as well, where the scheme "first" does not. Its own converter
            # has no other form for it either.
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            return bool(scheme != "never")
    raise unsupported("normalizer and pre-tokenizer are not SentencePiece's")


def flat_steps(part: Any, key: str) -> list[dict[str, Any]]:
    """Return the steps of a section of tokenizer.json; nested sequences are flattened."""
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [step for child in part.get(key, []) for step in flat_steps(child, key)]
    if part.get("type") == "ByteLevel":  # offsets do not change tokens
        return [{"add_prefix_space": True, "use_regex": True, **part, "trim_offsets": None}]
    return [part]
