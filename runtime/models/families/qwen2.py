"""Qwen 2 and 2.5: Llama with biases on q, k and v, and a sliding window over the upper layers if it is switched on."""

from typing import Any

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def windows(raw: Fields, fields: dict[str, Any]) -> tuple[int | None, ...]:
    """`sliding_window` counts only with `use_sliding_window`, and from layer `max_window_layers` upwards."""
    if not raw.boolean("use_sliding_window", False):
        return hf_config.layer_windows(raw, fields["layers"], None)
    window = raw.integer("sliding_window", 4096)
    if raw.has("layer_types"):
        return hf_config.layer_windows(raw, fields["layers"], window)
    first = raw.integer("max_window_layers", 28, low=0)
    chosen = tuple(window if layer >= first else None for layer in range(fields["layers"]))
    return chosen if any(chosen) else ()


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a Qwen 2 config.json."""
    fields = hf_config.common(raw)
    return ModelConfig(**fields, qkv_bias=True, windows=windows(raw, fields))
