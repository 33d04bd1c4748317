"""The tokenizer.json sections of BPE vocabularies in GGUF files: byte-level, SentencePiece and Gemma's."""

from collections.abc import Mapping, Sequence
from typing import Any

from mycli.runtime.tokenizer.gguf_encoders import between_ends
from mycli.runtime.tokenizer.gguf_vocabulary import (
    CONTROL,
    MAX_GGUF_TOKENS,
    UNKNOWN,
    USER,
    added_tokens,
    ggml_key,
    read_tokens,
    token_id,
    token_numbers,
    vocabulary_ids,
)
from mycli.runtime.tokenizer.special_tokens import is_space
from mycli.runtime.tokenizer.split_patterns import PRE_TOKENIZERS, PreTokenizer
from mycli.runtime.utils.json_fields import Fields

_MAX_DERIVED = 1 << 22  # characters of a vocabulary without merges: 16 for each of 262,144 tokens
_SPACE = "▁"
_GEMMA = ("gemma", "gemma2", "gemma3", "gemma3n")  # architectures whose merges are ranked by id, not by score
# Files of before May 2024 have no `pre`; these architectures had one rule then.
_OLDER_RULES = {name: name for name in ("qwen2", "olmo", "command-r", "falcon")}
_OLDER_RULES |= {"qwen2moe": "qwen2", "starcoder2": "starcoder", "phi2": "phi-2", "gptneox": "gpt-2"}
_OLDER_RULES |= {"gpt2": "gpt-2", "starcoder": "starcoder"}
_SPACED = ("sarvam-moe",)  # `pre` of "gpt2" vocabularies that are SentencePiece's, with merges
_NEOX_TOKENS = 51200  # at most, padded


def _stored_merges(metadata: Fields, vocabulary: Mapping[str, int]) -> list[list[str]]:
    # A token may contain a space, so the separator is the space between two tokens of the vocabulary.
    merges = []
    for line in metadata.array(ggml_key("merges"), str, MAX_GGUF_TOKENS):
        left, _, right = line.partition(" ")
        if not (left in vocabulary and right in vocabulary):
            splits = [(line[:at], line[at + 1 :]) for at, letter in enumerate(line) if letter == " "]
            left, right = next(((a, b) for a, b in splits if a in vocabulary and b in vocabulary), ("", ""))
        if not left or left + right not in vocabulary:
            raise metadata.fail(ggml_key("merges"), f"holds {line!r:.60}, which does not join two tokens to a third")
        merges.append([left, right])
    return merges


def derived_merges(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[list[str]]:
    """Return the merges that a SentencePiece vocabulary implies: all splits of a token into two, best token first.

    scores: by token; equal scores are ordered by the length of the left part, then of the right.
    """
    merges = []
    for token, score in scores.items():
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(-score, len(left), len(right), left, right) for left, right in pairs]
    merges.sort(key=lambda entry: entry[:3])
    return [[left, right] for *_, left, right in merges]


def _derived(metadata: Fields, vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[list[str]]:
    # Each character is a split to try, so a hostile vocabulary could take hours.
    characters = sum(map(len, vocabulary))
    if characters > _MAX_DERIVED:
        problem = f"holds {characters} characters, more than the {_MAX_DERIVED} allowed where no merges are given"
        raise metadata.fail(ggml_key("tokens"), problem)
    return derived_merges(vocabulary, scores)


def _wrapping(metadata: Fields, tokens: Sequence[str], default_bos: bool) -> dict[str, Any] | None:
    # The post-processor that adds bos and eos, if the file asks for them.
    pieces: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special: dict[str, Any] = {}
    for name, default in (("bos", default_bos), ("eos", False)):
        index = token_id(metadata, name, len(tokens))
        if index is None or not metadata.boolean(ggml_key(f"add_{name}_token"), default):
            continue
        text = tokens[index]
        pieces.insert(0 if name == "bos" else len(pieces), {"SpecialToken": {"id": text, "type_id": 0}})
        special[text] = {"id": text, "ids": [index], "tokens": [text]}
    if not special:
        return None
    # As of ModernBERT: the second text follows the first one's end.
    second: list[dict[str, Any]] = [{"Sequence": {"id": "B", "type_id": 0}}]
    second += pieces[-1:] if "SpecialToken" in pieces[-1] else []
    return {"type": "TemplateProcessing", "single": pieces, "pair": [*pieces, *second], "special_tokens": special}


def bpe_model(vocabulary: Mapping[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    """Return the section `model` of a tokenizer.json."""
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **plain, **flags, **options, "vocab": vocabulary, "merges": merges}


def pre_tokenizer(metadata: Fields) -> PreTokenizer:
    """Return the pre-tokenization that the file names. Raises ModelError for an unknown name."""
    name = metadata.text(ggml_key("pre"), "") or _older_rule(metadata)
    if name not in PRE_TOKENIZERS:
        hint = f"known: {', '.join(PRE_TOKENIZERS)}; or use the repository that holds safetensors files"
        raise metadata.fail(ggml_key("pre"), f"{name!r} is not a known pre-tokenizer", hint)
    return PRE_TOKENIZERS[name]


def _older_rule(metadata: Fields) -> str:
    architecture = metadata.text("general.architecture")
    if architecture == "stablelm":  # the 3B models have GPT-NeoX's vocabulary
        return "stablelm2" if len(read_tokens(metadata)[0]) > _NEOX_TOKENS else "gpt-2"
    return _OLDER_RULES.get(architecture, "default")


def byte_level(metadata: Fields) -> dict[str, Any]:
    tokens, types = read_tokens(metadata)
    rule = pre_tokenizer(metadata)
    vocabulary = vocabulary_ids(metadata, tokens, types)
    ends = rule.ends and between_ends(metadata, tokens, rule.ends)
    return {
        "added_tokens": added_tokens(tokens, types),
        **rule.sections(),
        "post_processor": ends or _wrapping(metadata, tokens, rule.add_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": bpe_model(vocabulary, _stored_merges(metadata, vocabulary), ignore_merges=rule.ignore_merges),
    }


def has_spaces_as_letters(metadata: Fields) -> bool:
    """Return whether a byte-level vocabulary by its name is one of SentencePiece."""
    return metadata.text(ggml_key("model")) == "gpt2" and metadata.text(ggml_key("pre"), "") in _SPACED


def sentencepiece_bpe(metadata: Fields, architecture: str) -> dict[str, Any]:
    tokens, types = read_tokens(metadata)
    spaced = has_spaces_as_letters(metadata)
    gemma = architecture in _GEMMA or metadata.text(ggml_key("model")) == "gemma4" or spaced
    # Tokens of spaces are stored as spaces, but the normalizer replaces all spaces of the text.
    spelled = [_SPACE * len(text) if " " in text and not text.strip(" ") else text for text in tokens]
    vocabulary = vocabulary_ids(metadata, spelled, types)
    if metadata.has(ggml_key("merges")):
        merges = _stored_merges(metadata, vocabulary)
    else:
        scores = range(0, -len(tokens), -1) if gemma else token_numbers(metadata, "scores", len(tokens), float)
        # Text becomes an added token by its spelling, never by merges.
        merged = [text for text, index in vocabulary.items() if types[index] not in (CONTROL, USER) or is_space(text)]
        merges = _derived(metadata, vocabulary, {text: scores[vocabulary[text]] for text in merged})
    prefix = metadata.boolean(ggml_key("add_space_prefix"), not gemma)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    cut = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    unknown = token_id(metadata, "unknown", len(tokens))
    if unknown is None and UNKNOWN in types:
        unknown = types.index(UNKNOWN)
    bos = metadata.text(ggml_key("model")) != "gemma4"  # its chat template writes bos, and its tokenizer.json adds none
    return {
        "added_tokens": [token for token in added_tokens(tokens, types) if token["content"] in vocabulary],
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if prefix else replace,
        "pre_tokenizer": cut if gemma else None,
        "post_processor": _wrapping(metadata, tokens, not spaced) if bos else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": bpe_model(
            vocabulary,
            merges,
            unk_token=None if unknown is None else spelled[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }
