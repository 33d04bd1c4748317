"""Qwen 3, dense: Llama with RMSNorm over each query and key head before the rotation, and a head_dim of its own."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families.qwen2 import windows
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a Qwen 3 config.json."""
    fields = hf_config.common(raw, head_dim=128)
    bias = raw.boolean("attention_bias", False)
    return ModelConfig(**fields, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows(raw, fields))
