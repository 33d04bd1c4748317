"""Converts the tokenizer metadata of a GGUF file to tokenizer.json and tokenizer_config.json.

Supports llama.cpp's vocabularies "gpt2" (byte-level BPE), "llama" (SentencePiece BPE, merges derived from scores),
"gemma4" (with stored merges), "bert" (WordPiece) and the "t5" of encoders (Unigram). The result is checked and run like
any tokenizer.json.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from mycli.runtime.tokenizer.gguf_bpe import byte_level, has_spaces_as_letters, sentencepiece_bpe
from mycli.runtime.tokenizer.gguf_encoders import unigram, word_piece
from mycli.runtime.tokenizer.gguf_vocabulary import EOS_TEXTS, SUPPORTED_KINDS, ggml_key, read_tokens, token_id
from mycli.runtime.utils.json_fields import Fields

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
# With these, <|end|> ends only a message of a reply: gpt-oss, Solar Open.
_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}, {"<|call|>", "<|flush|>"})


def eos_token_ids(metadata: Fields) -> list[int]:
    """Return the ids that end a reply: of the keys eos, eot and eom, and of tokens with well-known text."""
    tokens, _ = read_tokens(metadata)
    ids = [index for name in ("eos", "eot", "eom") if (index := token_id(metadata, name, len(tokens))) is not None]
    more = metadata.values.get(ggml_key("eos_token_ids"))  # of Ollama's converter
    if isinstance(more, array):
        ids += [index for index in more if isinstance(index, int) and 0 <= index < len(tokens)]
    ids += [index for index, text in enumerate(tokens) if text in EOS_TEXTS]
    if any(ends <= {tokens[index] for index in ids} for ends in _MESSAGES):
        ids = [index for index in ids if tokens[index] != "<|end|>"]
    return list(dict.fromkeys(ids))


def tokenizer_json(metadata: Fields) -> dict[str, Any]:
    """Return the tokenizer.json for the metadata. Raises ModelError with the key at fault."""
    kind = metadata.text(ggml_key("model"))
    spaced = has_spaces_as_letters(metadata)
    if kind == "gpt2" and not spaced:
        sections = byte_level(metadata)
    elif kind in ("llama", "gemma4") or spaced:
        sections = sentencepiece_bpe(metadata, metadata.text("general.architecture"))
    elif kind == "bert":
        sections = word_piece(metadata)
    elif kind == "t5" and metadata.text("general.architecture") in ("bert", "jina-bert-v3"):
        sections = unigram(metadata)
    else:
        raise metadata.fail(ggml_key("model"), f"{kind!r} is a tokenizer that is not supported", SUPPORTED_KINDS)
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
