"""IQuest-Coder (40B): Llama with a head_dim of its own."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5)
    return ModelConfig(
        **hf_config.common(raw), **hf_config.attention_biases(raw), mlp_bias=raw.boolean("mlp_bias", False)
    )
