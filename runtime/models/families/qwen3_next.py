"""Qwen 3 Next (80B-A3B, Coder): Qwen 3.5's layers with experts and a shared expert with a gate."""

from mycli.runtime.models.config import MAX_LAYERS, ModelConfig
from mycli.runtime.models.experts import MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.families.qwen3_5_text import read_delta, with_delta_defaults
from mycli.runtime.models.families.qwen3_moe import dense_layers
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw, layers = with_delta_defaults(raw, 2), raw.integer("num_hidden_layers", high=MAX_LAYERS)
    count, top_k = read_expert_counts(raw, "num_experts", layers, default=(512, 10))
    mixture = MoeLayers(
        count,
        RoutingSpec(top_k, raw.boolean("norm_topk_prob", True)),
        size=raw.integer("moe_intermediate_size", 512),
        dense=dense_layers(raw, layers),
        shared=raw.integer("shared_expert_intermediate_size", 512),
    )
    return read_delta(raw, mixture, fused=True)
