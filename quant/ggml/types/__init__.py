"""The ggml types that the solver writes, one file each; the file's name is that of the type in lower case."""

import importlib
import pkgutil
from functools import lru_cache

from mycli.quant.ggml.block_type import BlockType


def names() -> list[str]:
    return sorted(module.name.upper() for module in pkgutil.iter_modules(__path__))


@lru_cache
def load(name: str) -> BlockType:
    """Return the type with this name in ggml, such as Q4_K."""
    kind = importlib.import_module(f"{__name__}.{name.lower()}").TYPE
    assert isinstance(kind, BlockType)
    return kind
