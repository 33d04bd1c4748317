"""EXAONE 4: norms after attention and MLP instead of before, and per-head norms of queries and keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.families import olmo2
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    olmo, llama = olmo2.layer(config, index), llama_layer(config, index).attention
    return replace(olmo, mixer=replace(olmo.attention, q_norm=llama.q_norm, k_norm=llama.k_norm))


def windows_and_ropes(raw: Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ModelConfig fields of EXAONE's sliding windows; `fields`: those of `hf_config.common`."""
    sliding = (False,) * fields["layers"]
    if raw.has("sliding_window"):
        period = 4 if raw.has("layer_types") else raw.integer("sliding_window_pattern", 4)
        sliding = hf_config.layers_of_type(raw, fields["layers"], hf_config.all_but_every(period))
    rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"])
    return {
        "windows": hf_config.layer_windows(raw, sliding),
        # With sliding windows, layers with full attention have no positions.
        "layer_ropes": tuple(rope if slides or not raw.has("sliding_window") else None for slides in sliding),
    }


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5, sliding_window=4096)
    fields = hf_config.common(raw)
    return ModelConfig(**fields, **windows_and_ropes(raw, fields), qk_norm=True, build_layer=layer)
