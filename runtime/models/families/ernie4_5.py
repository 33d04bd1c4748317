"""ERNIE 4.5, dense: Llama with interleaved rotary embedding."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw, head_dim=128, num_key_value_heads=2, rope_theta=500000.0, rms_norm_eps=1e-5, tie_word_embeddings=True
    )
    bias = raw.boolean("use_bias", False)
    fields = hf_config.common(raw)
    return ModelConfig(**fields, qkv_bias=bias, output_bias=bias, mlp_bias=bias, interleaved=True)
