"""Qwen 3, dense: Llama with RMSNorm over each query and key head before the rotation, and a head_dim of its own."""

from mycli.runtime.config import ModelConfig
from mycli.runtime.fields import Fields
from mycli.runtime.models import _common
from mycli.runtime.models.qwen2 import windows


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a Qwen 3 config.json."""
    fields = _common.common(raw)
    fields["head_dim"] = raw.integer("head_dim", 128, high=1 << 16)  # the family's default, not hidden / heads
    bias = raw.boolean("attention_bias", False)
    return ModelConfig(**fields, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=windows(raw, fields))
