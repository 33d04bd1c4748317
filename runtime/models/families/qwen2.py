"""Qwen 2 and 2.5: Llama with biases on q, k and v, and an optional sliding window in the upper layers."""

from typing import Any

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields


def windows(raw: Fields, fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Return the windows: none without `use_sliding_window`, else in the layers from `max_window_layers` on."""
    if not raw.boolean("use_sliding_window", False):
        return hf_config.uniform_windows(raw, fields["layers"], None)
    window = hf_config.optional_window(raw, 4096)
    if window is None or raw.has("layer_types"):
        return hf_config.uniform_windows(raw, fields["layers"], window)
    first = raw.integer("max_window_layers", 28, low=0)
    layers = tuple(window if layer >= first else None for layer in range(fields["layers"]))
    return layers if any(layers) else ()


def read(raw: Fields) -> ModelConfig:
    fields = hf_config.common(raw)
    return ModelConfig(**fields, qkv_bias=True, windows=windows(raw, fields))
