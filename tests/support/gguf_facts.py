"""Headers of GGUF files as llama.cpp's converter writes them, one recorded model per architecture.

Record them with `python -m tests.benchmarks.gguf_converter LLAMA_CPP --record FILE`.
"""

import json
from array import array
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from mycli.runtime.checkpoint.gguf.folder import GgufFolder
from mycli.runtime.checkpoint.gguf.header import GgufHeader
from mycli.runtime.checkpoint.safetensors_header import TensorEntry
from mycli.runtime.utils.json_fields import Fields
from tests.support.gguf_files import byte_tokenizer
from tests.support.paths import ROOT

_RECORDED = ROOT / "tests" / "runtime" / "checkpoint" / "gguf" / "converter_facts.json"
FACTS: dict[str, Any] = json.loads(_RECORDED.read_text())
_KINDS = {int: "i", float: "f"}


def _typed(value: Any) -> Any:
    return array(_KINDS[type(value[0])], value) if isinstance(value, list) and type(value[0]) in _KINDS else value


def gguf_header(keys: Mapping[str, Any], tensors: Mapping[str, list[int]]) -> GgufHeader:
    """Return a header with these keys, over those of a small tokenizer, and F32 tensors of these GGUF shapes."""
    entries = {
        name: TensorEntry(name, "F32", tuple(reversed(shape)), "a.gguf", 0, 4 * prod(shape))
        for name, shape in tensors.items()
    }
    values = {key: _typed(value) for key, value in {**byte_tokenizer(97), **keys}.items()}
    lists = {key: len(value) for key, value in values.items() if isinstance(value, array) and value.typecode == "f"}
    arrays = {key: TensorEntry(key, "F32", (count,), "a.gguf", 0, 4 * count) for key, count in lists.items()}
    return GgufHeader(Fields(values, "a.gguf"), entries, arrays)


def gguf_folder(facts: Mapping[str, Any], tokenizer: Mapping[str, Any] | None = None) -> GgufFolder:
    """Return the model of recorded `facts`, which have the keys `keys`, `tensors` and `factors`."""
    header = gguf_header({**facts["keys"], **(tokenizer or {})}, facts["tensors"])
    return GgufFolder.from_header(header, lambda name: facts["factors"], Path("a.gguf"))
