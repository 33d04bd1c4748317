"""DeepSeek-MoE (16B): Llama's attention, softmax-routed experts and shared experts."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames(shared="shared_experts", shared_gate=None)


def read(raw: Fields) -> ModelConfig:
    hf_config.require(raw, scoring_func="softmax", moe_layer_freq=1)
    raw = hf_config.with_defaults(raw, max_position_embeddings=2048)
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    top_k = raw.integer("num_experts_per_tok")  # its code has no default
    count, _ = read_expert_counts(raw, "n_routed_experts", fields["layers"], default=(64, top_k))
    size = raw.integer("moe_intermediate_size")
    mixture = MoeLayers(
        count,
        RoutingSpec(
            top_k,
            raw.boolean("norm_topk_prob", False),
            scale=raw.number("routed_scaling_factor", 1.0, low=1e-6, high=1e6),
        ),
        size,
        _NAMES,
        dense=frozenset(range(raw.integer("first_k_dense_replace", 0, low=0, high=fields["layers"]))),
        shared=size * raw.integer("n_shared_experts", 0, low=0, high=count),
    )
    return ModelConfig(**fields, **hf_config.attention_biases(raw), build_layer=mixture)
