"""Ministral 8B (2024): Mistral with a sliding window in some layers."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, num_key_value_heads=8, sliding_window=4096)
    fields = hf_config.common(raw)
    sliding = hf_config.layers_of_type(raw, fields["layers"], lambda _: raw.has("sliding_window"))
    return ModelConfig(**fields, windows=hf_config.layer_windows(raw, sliding))
