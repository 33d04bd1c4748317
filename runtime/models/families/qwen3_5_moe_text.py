"""Qwen 3.5 and 3.6 with experts (35B-A3B, 122B-A10B, 397B-A17B), text model: Qwen 3.5's token mixers."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig
from mycli.runtime.models.experts import MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.families.qwen3_5_text import read_delta, with_delta_defaults
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    size, layers = raw.integer("moe_intermediate_size", 512), raw.integer("num_hidden_layers", high=MAX_LAYERS)
    raw = hf_config.with_defaults(with_delta_defaults(raw, 2), intermediate_size=size)  # no layer has an MLP
    count, top_k = read_expert_counts(raw, "num_experts", layers, default=(256, 8))
    shared = raw.integer("shared_expert_intermediate_size", 512)
    return read_delta(raw, MoeLayers(count, RoutingSpec(top_k, normalize=True), size, shared=shared))
