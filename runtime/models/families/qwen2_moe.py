"""Qwen 1.5 and 2 with experts (A2.7B, 57B-A14B): Qwen 2's attention, experts, and a shared expert with a gate."""

from typing import Any

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.families import qwen2
from mycli.runtime.models.families.qwen3_moe import dense_layers
from mycli.runtime.utils.json_fields import Fields


def _windows(raw: Fields, fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Return the windows as Qwen 2 does; without `layer_types`, of every other layer before `max_window_layers`."""
    if not raw.boolean("use_sliding_window", False) or raw.has("layer_types"):
        return qwen2.windows(raw, fields)
    window, end = hf_config.optional_window(raw, 4096), raw.integer("max_window_layers", 28, low=0)
    layers = tuple(window if layer < end and layer % 2 == 0 else None for layer in range(fields["layers"]))
    return layers if any(layers) else ()


def read(raw: Fields) -> ModelConfig:
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    count, top_k = read_expert_counts(raw, "num_experts", fields["layers"], default=(60, 4))
    mixture = MoeLayers(
        count,
        RoutingSpec(top_k, raw.boolean("norm_topk_prob", False)),
        size=raw.integer("moe_intermediate_size", 1408),
        dense=dense_layers(raw, fields["layers"]),
        shared=raw.integer("shared_expert_intermediate_size", 5632),
    )
    bias = raw.boolean("qkv_bias", True)
    return ModelConfig(**fields, qkv_bias=bias, windows=_windows(raw, fields), build_layer=mixture)
