"""LFM2 with experts (8B-A1B, 24B-A2B): LFM2 with sigmoid-routed experts with a correction bias."""

from dataclasses import replace

from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.families import lfm2
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames("feed_forward", gate="w1", up="w3", down="w2")
_EPSILON = 1e-6  # added to the sum of weights, a constant in transformers' code


def read(raw: Fields) -> ModelConfig:
    dense = {key: value for key, value in raw.values.items() if key not in EXPERT_KEYS}
    config = lfm2.read(Fields({**dense, "block_auto_adjust_ff_dim": False}, raw.source))
    count, top_k = read_expert_counts(raw, "num_experts", config.layers, default=(32, 4))
    mixture = MoeLayers(
        count,
        RoutingSpec(
            top_k,
            raw.boolean("norm_topk_prob", True),
            "sigmoid",
            epsilon=_EPSILON,
            scale=raw.number("routed_scaling_factor", 1.0, low=1e-6, high=1e6),
        ),
        raw.integer("moe_intermediate_size", 1792),
        replace(_NAMES, correction_bias="expert_bias") if raw.boolean("use_expert_bias", True) else _NAMES,
        dense=frozenset(range(raw.integer("num_dense_layers", 2, low=0, high=config.layers))),
        base=config.build_layer,
    )
    return replace(config, build_layer=mixture)
