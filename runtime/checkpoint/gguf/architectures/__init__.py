"""The architectures of GGUF files, one declaration `ARCHITECTURE` per file.

The file name is the registry: general.architecture with "-" written as "_".
"""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.utils.json_fields import Fields


def _files() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def _load(file: str) -> Architecture:
    architecture: Architecture = importlib.import_module(f"{__name__}.{file}").ARCHITECTURE
    return architecture


def architectures() -> Iterator[Architecture]:
    return map(_load, _files())


def read_architecture(metadata: Fields) -> Architecture:
    """Return the architecture that general.architecture names. Raises ModelError for one without a file."""
    name = metadata.text("general.architecture")
    file = name.replace("-", "_")
    architecture = _load(file) if file in _files() else None
    if architecture is None or architecture.name != name:
        supported = ", ".join(sorted({known.name for known in architectures()}))
        raise metadata.fail("general.architecture", f"{name!r} is not supported", f"supported: {supported}")
    return architecture.of_file(metadata)


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
            written = architecture.of_kind(any(isinstance(spec.mlp, ExpertsSpec) for spec in config.layer_specs))
            if not written.recurrent_tensors:
                return written
            recurrent = frozenset(spec.index for spec in config.layer_specs if spec.recurrent is not None)
            return replace(written, recurrent_layers=recurrent)
    raise ModelError(
        f"config.json: model_type {model_type!r} cannot be written as GGUF: llama.cpp has no architecture for it",
        "export to safetensors",
    )
