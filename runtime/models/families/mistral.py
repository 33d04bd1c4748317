"""Mistral 7B and Nemo: Llama with a sliding window in all layers unless the config has a null there."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, num_key_value_heads=8, sliding_window=4096)
    fields = hf_config.common(raw)
    return ModelConfig(**fields, windows=hf_config.mistral_windows(raw, fields))
