"""Qwen 3, dense: Llama with per-head norms of q and k, and a head_dim of its own."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families.qwen2 import windows
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    fields = hf_config.common(hf_config.with_defaults(raw, head_dim=128))
    return ModelConfig(**fields, **hf_config.attention_biases(raw), qk_norm=True, windows=windows(raw, fields))
