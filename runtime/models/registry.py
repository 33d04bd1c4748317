"""Reads a config.json with the family file of its `model_type`: `families/<model_type>.py` is the registry."""

import importlib
import pkgutil

from mycli.runtime.models import families as family_modules
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields

_MAMBA = "its Mamba layers are not implemented"
_INDEXER = "its attention to the keys that an indexer selects is not implemented"

# Known families that cannot run, so that the error names the missing feature.
REFUSED: dict[str, str] = {
    "deepseek_v32": _INDEXER,
    "deepseek_v4": _INDEXER,
    "falcon_h1": _MAMBA,
    "falcon_mamba": _MAMBA,
    "gemma3n": "its AltUp residual streams and Laurel blocks are not implemented",
    "glm_moe_dsa": _INDEXER,
    "jamba": _MAMBA,
    "llama4": "its chunked attention is not implemented",
    "longcat_flash": "its layers of two attentions with a shortcut mixture of experts are not implemented",
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "mllama": "its cross-attention to images is not implemented",
    "nemotron_h": _MAMBA,
    "phimoe": "its SparseMixer routing is not implemented",
    "recurrent_gemma": "its RG-LRU layers are not implemented",
    "t5": "encoder-decoder models are not implemented",
    "t5gemma": "encoder-decoder models are not implemented",
}


def families() -> list[str]:
    """Return the `model_type` values that can be read."""
    return sorted(module.name for module in pkgutil.iter_modules(family_modules.__path__))


def parse_config(raw: Fields) -> ModelConfig:
    """Return the ModelConfig of a parsed config.json. Raises ModelError naming the field at fault."""
    model_type = raw.text("model_type")
    # Only names of files in `families` are imported: config.json may come from a stranger.
    if model_type not in families():
        reason = f": {REFUSED[model_type]}" if model_type in REFUSED else ""
        raise raw.fail(
            "model_type", f"{model_type!r:.60} is not supported{reason}", f"supported: {', '.join(families())}"
        )
    module = importlib.import_module(f"mycli.runtime.models.families.{model_type}")
    config: ModelConfig = module.read(raw)
    return config
