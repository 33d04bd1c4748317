"""Ministral 3: Mistral with yarn, and queries scaled by the position (Llama 4's attention temperature)."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw, head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=262144
    )
    raw = hf_config.with_default_rope(raw, _ROPE)
    fields = hf_config.common(raw, handled=("llama_4_scaling_beta",))
    return ModelConfig(**fields, windows=hf_config.mistral_windows(raw, fields))
