"""Ministral 3: Mistral stretched by yarn, whose queries grow with the logarithm of how often their position passes the
trained context."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a Ministral 3 config.json."""
    raw = hf_config.with_defaults(raw, head_dim=128, max_position_embeddings=262144)
    if not (raw.has("rope_parameters") or raw.has("rope_scaling")):
        raw = Fields({**raw.values, "rope_parameters": _ROPE}, raw.source)
    fields = hf_config.common(raw, handled=("llama_4_scaling_beta",))
    return ModelConfig(**fields, windows=hf_config.sliding_windows(raw, fields))
