"""Qwen 3 with experts (30B-A3B, 235B-A22B, Coder): Qwen 3's attention, experts in all or some layers."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.utils.json_fields import Fields


def dense_layers(raw: Fields, layers: int) -> frozenset[int]:
    """Return the layers that have an MLP: `mlp_only_layers`, and all but each `decoder_sparse_step`-th."""
    step, mlp_only = raw.integer("decoder_sparse_step", 1), raw.array("mlp_only_layers", int)
    return frozenset(index for index in range(layers) if index in mlp_only or (index + 1) % step)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, num_key_value_heads=4)
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    key = "num_experts" if raw.has("num_experts") else "num_local_experts"
    count, top_k = read_expert_counts(raw, key, fields["layers"], default=(128, 8))
    mixture = MoeLayers(
        count,
        RoutingSpec(top_k, raw.boolean("norm_topk_prob", False)),
        size=raw.integer("moe_intermediate_size", 768),
        dense=dense_layers(raw, fields["layers"]),
    )
    # In all layers, unlike Qwen 2 and 3: transformers does not read max_window_layers here.
    window = hf_config.optional_window(raw, 4096) if raw.boolean("use_sliding_window", False) else None
    windows = hf_config.uniform_windows(raw, fields["layers"], window)
    return ModelConfig(**fields, **hf_config.attention_biases(raw), qk_norm=True, windows=windows, build_layer=mixture)
