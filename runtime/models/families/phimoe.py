"""Phi-3.5-MoE: Mixtral with LayerNorms, a head with an optional bias, and experts chosen by SparseMixer."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1000000.0)
    # SparseMixer is defined for two experts: the second is chosen with the first masked.
    hf_config.require(raw, num_experts_per_tok=2)
    fields = hf_config.common(raw, handled=("longrope", *EXPERT_KEYS))
    head_bias = raw.boolean("lm_head_bias", False)
    if head_bias:
        hf_config.require_untied_head(fields)
    count, top_k = read_expert_counts(raw, "num_local_experts", fields["layers"], default=(16, 2))
    jitter = raw.number("router_jitter_noise", 0.01, low=0.0, high=1.0)
    routing = RoutingSpec(top_k, normalize=False, scoring="sparse_mixer", jitter=jitter)
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        layer_norm=True,
        norm_bias=True,
        head_bias=head_bias,
        windows=hf_config.mistral_windows(raw, fields),
        build_layer=MoeLayers(count, routing, fields["intermediate_size"], _NAMES),
    )
