"""The architectures of GGUF files, one declaration `ARCHITECTURE` per file.

The file name is the registry: general.architecture with "-" written as "_", then maybe "__" and the kind of model, for
several that llama.cpp gives one name.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.header import GgufHeader
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig


def _files() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def _load(file: str) -> Architecture:
    architecture: Architecture = importlib.import_module(f"{__name__}.{file}").ARCHITECTURE
    return architecture


def architectures() -> Iterator[Architecture]:
    return map(_load, _files())


def read_architecture(header: GgufHeader) -> Architecture:
    """Return the architecture that general.architecture names. Raises ModelError for one without a file."""
    metadata = header.metadata
    name = metadata.text("general.architecture")
    kinds = [_load(file) for file in _files() if file.partition("__")[0] == name.replace("-", "_")]
    if not any(architecture.name == name for architecture in kinds):
        supported = ", ".join(sorted({known.name for known in architectures()}))
        raise metadata.fail("general.architecture", f"{name!r} is not supported", f"supported: {supported}")
    experts = metadata.integer(f"{name}.expert_count", 0, low=0) > 0
    return next(architecture for architecture in kinds if architecture.reads(header, experts))


def written_architecture(config: ModelConfig, outer_type: str = "") -> Architecture:
    """Return the architecture that a model is exported as; `outer_type`: of the multimodal model that it is a part of.

    Raises ModelError for a family without one.
    """
    for architecture in architectures():
        if outer_type in architecture.multimodal_types:
            return architecture
    model_type = config.model_type
    for architecture in architectures():
        if model_type in architecture.written_types and architecture.writes(config):
            if not architecture.recurrent_tensors:
                return architecture
            recurrent = frozenset(spec.index for spec in config.layer_specs if spec.recurrent is not None)
            return replace(architecture, recurrent_layers=recurrent)
    raise ModelError(
        f"config.json: model_type {model_type!r} cannot be written as GGUF: no architecture is written for this family",
        "export to safetensors",
    )
