"""The architectures of GGUF files, one declaration `ARCHITECTURE` per file.

The file name is the registry: general.architecture with "-" written as "_".
"""

import importlib
import pkgutil
from collections.abc import Iterator

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.errors import ModelError
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
        supported = ", ".join(known.name for known in architectures())
        raise metadata.fail("general.architecture", f"{name!r} is not supported", f"supported: {supported}")
    return architecture


def written_architecture(model_type: str) -> Architecture:
    """Return the architecture that a family is exported as. Raises ModelError for a family without one."""
    for architecture in architectures():
        if model_type in architecture.written_types:
            return architecture
    written = ", ".join(sorted(family for known in architectures() for family in known.written_types))
    raise ModelError(
        f"config.json: model_type {model_type!r} cannot be written as GGUF",
        f"written: {written}; llama.cpp's own converter may support the model",
    )
