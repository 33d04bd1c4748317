"""Code World Model: Llama with full attention in layers 0, 4, 8, ... and a sliding window in the others."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw, rope_theta=1000000.0, rms_norm_eps=1e-5, head_dim=128, num_key_value_heads=8, sliding_window=8192
    )
    raw = hf_config.with_default_rope(raw, _ROPE)
    fields = hf_config.common(raw)
    sliding = hf_config.layers_of_type(raw, fields["layers"], lambda index: index % 4 != 0)
    return ModelConfig(**fields, mlp_bias=raw.boolean("mlp_bias", False), windows=hf_config.layer_windows(raw, sliding))
