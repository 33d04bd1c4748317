"""Keys and tensor names as llama.cpp's converter writes them, recorded for one model of each architecture.

`python -m tests.benchmarks.gguf_converter LLAMA_CPP --record FILE` records them.
"""

import json
from array import array
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.checkpoint.gguf.architectures import architectures
from mycli.runtime.checkpoint.gguf.folder import GgufFolder
from mycli.runtime.checkpoint.gguf.header import GgufHeader
from mycli.runtime.checkpoint.safetensors_header import TensorEntry
from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.gguf_files import byte_tokenizer

FACTS: dict[str, Any] = json.loads(Path(__file__).with_name("converter_facts.json").read_text())


def _typed(value: Any) -> Any:
    """As `parse_gguf_header` returns it: numbers in an array."""
    return array("i", value) if isinstance(value, list) and type(value[0]) is int else value


def _folder(facts: dict[str, Any]) -> GgufFolder:
    tensors = {
        name: TensorEntry(name, "F32", tuple(reversed(shape)), "a.gguf", 0, 4 * prod(shape))
        for name, shape in facts["tensors"].items()
    }
    keys = {key: _typed(value) for key, value in {**facts["keys"], **byte_tokenizer(97)}.items()}
    return GgufFolder.from_header(
        GgufHeader(Fields(keys, "a.gguf"), tensors), lambda name: facts["factors"], Path("a.gguf")
    )


def test_every_architecture_is_recorded() -> None:
    assert {facts["keys"]["general.architecture"] for facts in FACTS.values()} == {
        known.name for known in architectures()
    }


@pytest.mark.parametrize("name", FACTS)
def test_the_converters_names_are_read(name: str) -> None:
    """Every tensor has a place and the shape that the model expects; none is missing."""
    folder = _folder(FACTS[name])
    assert set(folder.checked_manifest().tensors) == {name for name, _ in folder.config.tensors()}
    original = parse_config(Fields(FACTS[name]["config"], "config.json"))
    shapes = [(layer.index, [*layer.products()]) for layer in original.layer_specs]
    assert [(layer.index, [*layer.products()]) for layer in folder.config.layer_specs] == shapes
    assert folder.config.windows == original.windows or not any(folder.config.windows)
