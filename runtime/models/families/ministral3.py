"""Ministral 3: Mistral stretched by yarn, whose queries grow with the logarithm of how often their position passes the
trained context."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a Ministral 3 config.json."""
    raw = hf_config.with_defaults(raw, head_dim=128)
    fields = hf_config.common(raw, handled=("llama_4_scaling_beta",))
    return ModelConfig(**fields, windows=hf_config.sliding_windows(raw, fields))
