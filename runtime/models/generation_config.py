"""Reads a model's recommended sampling (generation_config.json) and the token ids that end its replies.

An unusable field is dropped with a warning: it changes the defaults only, and the user can still set the option.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mycli.runtime.errors import ModelError
from mycli.runtime.utils.json_fields import Fields, read_object

MAX_EOS = 64
MAX_SUPPRESSED = 256


@dataclass(frozen=True)
class GenerationDefaults:
    """The sampling that the model's authors recommend; None: no recommendation.

    temperature 0 to 100; top_p above 0 to 1; top_k in tokens, 0: off; min_p 0 to 1; repetition_penalty above 0 to 10;
    eos: token ids that end a reply; suppressed: token ids that are never sampled.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    do_sample: bool | None = None
    eos: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()


def _read_eos(raw: Fields, vocab_size: int) -> tuple[int, ...]:
    value = raw.values["eos_token_id"]
    ids = value if isinstance(value, list) else [value]
    if len(ids) > MAX_EOS:
        raise raw.fail("eos_token_id", f"lists {len(ids)} ids, more than {MAX_EOS}")
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
            raise raw.fail("eos_token_id", f"{json.dumps(item)[:40]} is not an id below {vocab_size}")
    return tuple(dict.fromkeys(ids))


def _read_suppressed(raw: Fields, vocab_size: int) -> tuple[int, ...]:
    ids = raw.array("suppress_tokens", int, MAX_SUPPRESSED)
    # Others are ignored, as in transformers and llama.cpp: multimodal models name tokens of larger vocabularies.
    return tuple(dict.fromkeys(item for item in ids if 0 <= item < vocab_size))


def read_generation_config(folder: Path, vocab_size: int) -> tuple[GenerationDefaults, tuple[str, ...]]:
    """Return the defaults in `folder`/generation_config.json, none without that file, and a warning per dropped field.

    Raises ModelError if the file is not a JSON object.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationDefaults(), ()
    return parse_generation_config(read_object(path), vocab_size)


def parse_generation_config(raw: Fields, vocab_size: int) -> tuple[GenerationDefaults, tuple[str, ...]]:
    """Return the defaults in a parsed generation_config.json, and a warning per dropped field."""
    readers: dict[str, tuple[str, Any]] = {
        "temperature": ("temperature", lambda: raw.number("temperature", high=100)),
        "top_p": ("top_p", lambda: raw.number("top_p", low=1e-6, high=1)),
        "top_k": ("top_k", lambda: raw.integer("top_k", low=0)),
        "min_p": ("min_p", lambda: raw.number("min_p", high=1)),
        "repetition_penalty": ("repetition_penalty", lambda: raw.number("repetition_penalty", low=1e-3, high=10)),
        "do_sample": ("do_sample", lambda: raw.boolean("do_sample", False)),
        "eos_token_id": ("eos", lambda: _read_eos(raw, vocab_size)),
        "suppress_tokens": ("suppressed", lambda: _read_suppressed(raw, vocab_size)),
    }
    defaults, warnings = GenerationDefaults(), []
    for key, (field, read) in readers.items():
        if not raw.has(key):
            continue
        try:
            defaults = replace(defaults, **{field: read()})
        except ModelError as error:
            warnings.append(f"{error.message}; ignored")
    if raw.values.get("begin_suppress_tokens"):  # speech models set it
        warnings.append(f"{raw.fail('begin_suppress_tokens', 'is not supported').message}; ignored")
    return defaults, tuple(warnings)


def stop_ids(
    generation: Sequence[int], config: Sequence[int], tokenizer: Sequence[int], vocab_size: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the sorted union of three sources of end-of-sequence ids, and warnings: ids dropped, or none found."""
    union = sorted({*generation, *config, *tokenizer})
    ids = tuple(item for item in union if 0 <= item < vocab_size)
    warnings = [
        f"end-of-sequence id {item} is outside the vocabulary of {vocab_size}; ignored"
        for item in union
        if item not in ids
    ]
    if not ids:
        warnings.append("the model names no end-of-sequence token; a reply ends only at its token limit")
    return ids, tuple(warnings)
