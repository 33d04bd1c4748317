"""Finds the family file that reads a config.json; `families/<model_type>.py` is the registry."""

import importlib
import pkgutil

from mycli.runtime.models import families as family_modules
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields

_EXPERTS = "its layers choose among experts"
_RECURRENT = "some of its layers keep a recurrent state instead of keys and values"
_LATENT = "its keys and values are compressed into a latent vector (MLA)"
_BOTH = "some of its layers are recurrent, and they choose among experts"

REFUSED: dict[str, str] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "falcon_h1": _RECURRENT,
    "falcon_mamba": _RECURRENT,
    "gemma3n": "its residual stream is several streams (AltUp), with a low-rank path beside each layer (Laurel)",
    "glm4_moe_lite": _LATENT,
    "granitemoehybrid": _BOTH,
    "jamba": _BOTH,
    "llama4": "its layers choose among experts, and some attend in chunks",
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "minicpm3": _LATENT,
    "mllama": "some of its layers attend to an image",
    "nemotron_h": _RECURRENT,
    "phimoe": _EXPERTS,
    "recurrent_gemma": _RECURRENT,
    "t5": "it has an encoder",
    "t5gemma": "it has an encoder",
}


def families() -> list[str]:
    """The `model_type` values that can be read: the modules of `runtime.models.families`."""
    return sorted(module.name for module in pkgutil.iter_modules(family_modules.__path__))


def parse_config(raw: Fields) -> ModelConfig:
    """The ModelConfig of a parsed config.json. Raises ModelError naming the field at fault."""
    model_type = raw.text("model_type")
    if model_type not in families():
        reason = f": {REFUSED[model_type]}" if model_type in REFUSED else ""
        raise raw.fail(
            "model_type", f"{model_type!r:.60} is not supported{reason}", f"supported: {', '.join(families())}"
        )
    module = importlib.import_module(f"mycli.runtime.models.families.{model_type}")
    config: ModelConfig = module.read(raw)
    return config
