"""Mellum 2 (12B-A2.5B): Qwen 3 MoE with sliding windows in some layers and rotary embedding by layer type."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, MoeLayers, read_dense_layers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.families import glm4_moe
from mycli.runtime.models.hf_rope import layer_type_ropes
from mycli.runtime.utils.json_fields import Fields

_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, head_dim=128, sliding_window=1024, num_key_value_heads=4)
    raw = hf_config.with_default_rope(raw, _ROPE)
    fields = hf_config.common(raw, handled=("rope_parameters", *EXPERT_KEYS))
    # transformers 5 writes num_local_experts.
    key = "num_local_experts" if raw.has("num_local_experts") else "num_experts"
    count, top_k = read_expert_counts(raw, key, fields["layers"], default=(64, 8))
    sliding = hf_config.layers_of_type(raw, fields["layers"])
    mixture = MoeLayers(
        count,
        RoutingSpec(top_k, raw.boolean("norm_topk_prob", True)),
        raw.integer("moe_intermediate_size", 896),
        dense=read_dense_layers(raw, fields["layers"]),
        base=glm4_moe.layer,
    )
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        qk_norm=True,
        windows=hf_config.layer_windows(raw, sliding),
        layer_ropes=layer_type_ropes(raw, fields["head_dim"], sliding),
        build_layer=mixture,
    )
