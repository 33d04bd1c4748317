"""Reads a config.json with the family file of its `model_type`: `families/<model_type>.py` is the registry."""

import importlib
import pkgutil

from mycli.runtime.models import families as family_modules
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields

_MAMBA = "its Mamba-1 layers are not implemented"
_INDEXER = "its indexer attention, which selects keys for each query, is not implemented"
_LIGHTNING = "its lightning attention is not implemented"
_ENCODER = "encoder-decoder models are not implemented"

# Known families that cannot run, so that the error names the missing feature.
REFUSED: dict[str, str] = {
    "bart": _ENCODER,
    "deepseek_v32": _INDEXER,
    "deepseek_v4": _INDEXER,
    "falcon_mamba": _MAMBA,
    "glm_moe_dsa": _INDEXER,
    "jamba": _MAMBA,
    "longcat_flash": "its layers of two attentions with a shortcut mixture of experts are not implemented",
    "mamba": _MAMBA,
    "minimax": _LIGHTNING,
    "mllama": "its cross-attention to images is not implemented",
    "recurrent_gemma": "its RG-LRU layers are not implemented",
    "t5": _ENCODER,
    "t5gemma": _ENCODER,
    "zamba": _MAMBA,
    "zamba2": "its blocks that several layers share, each with an adapter of its own, are not implemented",
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
