"""Converts the tokenizer metadata of a GGUF file to tokenizer.json and tokenizer_config.json.

Supports llama.cpp's vocabularies "gpt2" (byte-level BPE), "llama" (SentencePiece BPE, merges derived from scores),
"gemma4" (with stored merges) and "bert" (WordPiece). The result is checked and run like any tokenizer.json.
"""

from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from mycli.runtime.tokenizer.split_patterns import PRE_TOKENIZERS, PreTokenizer
from mycli.runtime.utils.json_fields import Fields

_MAX_TOKENS = 1 << 22
_MAX_TOKEN_CHARACTERS = 1024
_NO_TOKEN = (1 << 32) - 1  # -1, written by some converters
_MAX_DERIVED = 1 << 22  # characters of a vocabulary without merges: 16 for each of 262,144 tokens
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # `tokenizer.ggml.token_type`
_SPACE = "▁"
_GEMMA = ("gemma", "gemma2", "gemma3", "gemma3n")  # architectures whose merges are ranked by id, not by score
SPECIAL_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Of fill-in-the-middle; the first three have a key of older files, too.
FIM_IDS: Mapping[str, Sequence[str]] = {
    "prefix_token": ("fim_pre", "prefix"),
    "suffix_token": ("fim_suf", "suffix"),
    "middle_token": ("fim_mid", "middle"),
    "fim_pad_token": ("fim_pad",),
    "fim_repo_token": ("fim_rep",),
    "fim_file_token": ("fim_sep",),
}
# Tokens that end a reply whatever their key and type: llama.cpp finds them by their text, too.
_EOS_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "<end_of_utterance>"),
        *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<｜end▁of▁sentence｜>", "[e~["),
    )
)
# With these, <|end|> ends only a message of a reply: gpt-oss, Solar Open.
_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}, {"<|call|>", "<|flush|>"})
# Files of before May 2024 have no `pre`; these architectures had one rule then.
_OLDER_RULES = {name: name for name in ("qwen2", "olmo", "command-r")}
_OLDER_RULES |= {"qwen2moe": "qwen2", "starcoder2": "starcoder", "phi2": "phi-2"}
_NEOX_TOKENS = 51200  # at most, padded
_SUPPORTED = "supported: byte-level BPE (gpt2), SentencePiece BPE (llama), gemma4, WordPiece (bert), Unigram of BERT"
_ENDS = (("cls", "bos"), ("seperator", "eos"))  # keys of an encoder's tokens around a text; the first is newer


def ggml_key(name: str) -> str:
    return f"tokenizer.ggml.{name}"


def read_tokens(metadata: Fields) -> tuple[list[str], list[int]]:
    """Return the tokens by id and their types, CONTROL for known ends. Raises ModelError for mismatched lists."""
    tokens = metadata.array(ggml_key("tokens"), str, _MAX_TOKENS)
    if not tokens:
        raise metadata.fail(ggml_key("tokens"), "is missing or empty", _SUPPORTED)
    types = [NORMAL] * len(tokens)
    if metadata.values.get(ggml_key("token_type")) is not None:
        stored = _numbers(metadata, "token_type", len(tokens), int)
        types = [CONTROL if text in _EOS_TEXTS else kind for text, kind in zip(tokens, stored, strict=True)]
    longest = max(map(len, tokens))
    if longest > _MAX_TOKEN_CHARACTERS:
        raise metadata.fail(ggml_key("tokens"), f"holds a token of {longest} characters")
    return tokens, types


def _numbers(metadata: Fields, name: str, count: int, kind: type) -> list[Any]:
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


def eos_token_ids(metadata: Fields) -> list[int]:
    """Return the ids that end a reply: of the keys eos, eot and eom, and of tokens with well-known text."""
    tokens, _ = read_tokens(metadata)
    ids = [index for name in ("eos", "eot", "eom") if (index := token_id(metadata, name, len(tokens))) is not None]
    more = metadata.values.get(ggml_key("eos_token_ids"))  # of Ollama's converter
    if isinstance(more, array):
        ids += [index for index in more if isinstance(index, int) and 0 <= index < len(tokens)]
    ids += [index for index, text in enumerate(tokens) if text in _EOS_TEXTS]
    if any(ends <= {tokens[index] for index in ids} for ends in _MESSAGES):
        ids = [index for index in ids if tokens[index] != "<|end|>"]
    return list(dict.fromkeys(ids))


def added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Return the control and user-defined tokens as `added_tokens` of a tokenizer.json."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": text, **flags, "special": kind == CONTROL}
        for index, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER) and text
    ]


def _vocabulary(metadata: Fields, tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for index, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == UNUSED or not text:  # padding
            continue
        if text in vocabulary:
            raise metadata.fail(ggml_key("tokens"), f"holds {text!r:.60} twice, as {vocabulary[text]} and {index}")
        vocabulary[text] = index
    return vocabulary


def _stored_merges(metadata: Fields, vocabulary: Mapping[str, int]) -> list[list[str]]:
    # A token may contain a space, so the separator is the space between two tokens of the vocabulary.
    merges = []
    for line in metadata.array(ggml_key("merges"), str, _MAX_TOKENS):
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


def _byte_level(metadata: Fields) -> dict[str, Any]:
    tokens, types = read_tokens(metadata)
    rule = pre_tokenizer(metadata)
    vocabulary = _vocabulary(metadata, tokens, types)
    return {
        "added_tokens": added_tokens(tokens, types),
        **rule.sections(),
        "post_processor": _wrapping(metadata, tokens, rule.add_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": bpe_model(vocabulary, _stored_merges(metadata, vocabulary), ignore_merges=rule.ignore_merges),
    }


def _sentencepiece(metadata: Fields, architecture: str) -> dict[str, Any]:
    tokens, types = read_tokens(metadata)
    gemma = architecture in _GEMMA or metadata.text(ggml_key("model")) == "gemma4"
    # Tokens of spaces are stored as spaces, but the normalizer replaces all spaces of the text.
    spelled = [_SPACE * len(text) if " " in text and not text.strip(" ") else text for text in tokens]
    vocabulary = _vocabulary(metadata, spelled, types)
    if metadata.has(ggml_key("merges")):
        merges = _stored_merges(metadata, vocabulary)
    elif gemma:
        merges = _derived(metadata, vocabulary, {text: -index for text, index in vocabulary.items()})
    else:
        scores = _numbers(metadata, "scores", len(tokens), float)
        merges = _derived(metadata, vocabulary, {text: scores[index] for text, index in vocabulary.items()})
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
        "post_processor": _wrapping(metadata, tokens, True) if bos else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": bpe_model(
            vocabulary,
            merges,
            unk_token=None if unknown is None else spelled[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _between_ends(metadata: Fields, tokens: Sequence[str], texts: Sequence[str]) -> dict[str, Any]:
    # The post-processor of an encoder; texts: of its tokens around a text, where the file does not say their ids.
    # As in BERT the tokens of a pair have types, as in RoBERTa there are two tokens between its texts.
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


def _unigram(metadata: Fields) -> dict[str, Any]:
    tokens, types = read_tokens(metadata)
    scores = _numbers(metadata, "scores", len(tokens), float)
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
        "post_processor": _between_ends(metadata, tokens, ("<s>", "</s>")),
        "decoder": spaces,
        "model": {
            **{"type": "Unigram", "unk_id": unknown, "byte_fallback": False},
            "vocab": [list(pair) for pair in zip(tokens, scores, strict=True)],
        },
    }


def _word_piece(metadata: Fields) -> dict[str, Any]:
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
    vocabulary = _vocabulary(metadata, spelled, types)
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
        "post_processor": _between_ends(metadata, spelled, ("[CLS]", "[SEP]")),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]" if unknown is None else spelled[unknown],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocabulary,
        },
    }


def tokenizer_json(metadata: Fields) -> dict[str, Any]:
    """Return the tokenizer.json for the metadata. Raises ModelError with the key at fault."""
    kind = metadata.text(ggml_key("model"))
    if kind == "gpt2":
        sections = _byte_level(metadata)
    elif kind in ("llama", "gemma4"):
        sections = _sentencepiece(metadata, metadata.text("general.architecture"))
    elif kind == "bert":
        sections = _word_piece(metadata)
    elif kind == "t5" and metadata.text("general.architecture") == "bert":
        sections = _unigram(metadata)
    else:
        raise metadata.fail(ggml_key("model"), f"{kind!r} is a tokenizer that is not supported", _SUPPORTED)
    return {"version": "1.0", "truncation": None, "padding": None, **sections}


def tokenizer_settings(metadata: Fields) -> dict[str, Any]:
    """Return the tokenizer_config.json: special tokens by name, and chat templates."""
    tokens, _ = read_tokens(metadata)
    settings: dict[str, Any] = {}
    for name, key in SPECIAL_IDS.items():
        index = token_id(metadata, key, len(tokens))
        if index is not None:
            settings[name] = tokens[index]
    for name, keys in FIM_IDS.items():
        for key in keys:
            # Converters have written ids of another vocabulary; llama.cpp ignores them, too.
            index = metadata.values.get(ggml_key(f"{key}_token_id"))
            if type(index) is int and 0 <= index < len(tokens):
                settings.setdefault(name, tokens[index])
    templates = {}
    for key, value in metadata.values.items():
        if key.startswith("tokenizer.chat_template") and key != "tokenizer.chat_templates":
            if not isinstance(value, str):
                raise metadata.fail(key, "must be a string")
            templates[key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"] = value
    if list(templates) == ["default"]:
        settings["chat_template"] = templates["default"]
    elif templates:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return settings
