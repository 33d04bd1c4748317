"""Runs models: files, kernels, cache, engine, server. `open_model` is the Python interface; see docs/python.md."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mycli.runtime.engine.config import EngineConfig as EngineConfig
    from mycli.runtime.engine.replies.opened_model import OpenedModel as OpenedModel
    from mycli.runtime.open import open_model as open_model
    from mycli.runtime.sampling.params import SamplingParams as SamplingParams

# Imported on first use: light commands do not need these modules, which take longer to import than they run.
_PUBLIC = {
    "EngineConfig": "mycli.runtime.engine.config",
    "OpenedModel": "mycli.runtime.engine.replies.opened_model",
    "SamplingParams": "mycli.runtime.sampling.params",
    "open_model": "mycli.runtime.open",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
