"""InternLM 3: Llama with two key-value heads and optional biases under other names."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, num_key_value_heads=2, head_dim=128, rms_norm_eps=1e-5)
    # The names of the original repository are qkv_bias and bias.
    bias = raw.boolean("attention_bias", raw.boolean("qkv_bias", False))
    return ModelConfig(
        **hf_config.common(raw),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=raw.boolean("mlp_bias", raw.boolean("bias", False)),
    )
