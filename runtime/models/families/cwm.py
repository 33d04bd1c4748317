"""Code World Model: Llama with full attention in every fourth layer, the first one too, else a sliding window."""

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
    """The ModelConfig of a CWM config.json."""
    raw = hf_config.with_defaults(raw, rope_theta=1000000.0, head_dim=128, sliding_window=8192)
    if not (raw.has("rope_parameters") or raw.has("rope_scaling")):
        raw = Fields({**raw.values, "rope_parameters": _ROPE}, raw.source)
    fields = hf_config.common(raw)
    sliding = hf_config.sliding_layers(raw, fields["layers"], lambda index: index % 4 != 0)
    return ModelConfig(**fields, mlp_bias=raw.boolean("mlp_bias", False), windows=hf_config.windows_of(raw, sliding))
