"""Gives pico's tokenizer the fill-in-the-middle tokens of Qwen2.5-Coder, in place of its last tokens."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.paths import PICO
from tests.support.small_tokenizers import added

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def with_fim_tokens(loaded: LoadedModel, folder: Path) -> LoadedModel:
    write_fim_tokenizer(folder, loaded.vocabulary_size)
    return replace(loaded, tokenizer=Tokenizer.load(folder, loaded.vocabulary_size))


def write_fim_tokenizer(folder: Path, rows: int = 4096) -> None:
    shutil.copy(PICO / "tokenizer_config.json", folder)
    values = json.loads((PICO / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    replaced = [token for token, index in vocabulary.items() if index >= rows - len(MARKS)]
    for token in replaced:
        del vocabulary[token]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in values["model"]["merges"]]
    values["model"]["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)}.intersection(replaced)]
    first = rows - len(replaced)
    values["added_tokens"] += [added(first + index, mark, special=True) for index, mark in enumerate(MARKS)]
    (folder / "tokenizer.json").write_text(json.dumps(values))
