"""Hy 3 (295B-A21B): Qwen 3's attention; sigmoid-routed experts with a correction bias and a shared expert."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_dense_layers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.families import glm4_moe
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames(router="router.gate", shared="shared_mlp", shared_gate=None, correction_bias="expert_bias")


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rope_theta=11158840.0, head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5)
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    # Shared experts would have the biases too, routed ones not.
    hf_config.require(raw, mlp_bias=False)
    count, top_k = read_expert_counts(raw, "num_experts", fields["layers"], default=(192, 8))
    size = raw.integer("moe_intermediate_size", 1536)
    scale = raw.number("router_scaling_factor", 2.826, low=1e-6, high=1e6)
    mixture = MoeLayers(
        count,
        RoutingSpec(top_k, normalize=True, scoring="sigmoid", epsilon=1e-20, scale=scale),
        size,
        _NAMES,
        dense=read_dense_layers(raw, fields["layers"], first=1),
        shared=size * raw.integer("num_shared_experts", 1, high=count),
        base=glm4_moe.layer,
    )
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        qk_norm=True,
        build_layer=mixture,
    )
