"""Flint: Qwen 3 MoE with sigmoid-routed experts, a shared expert, attention sinks, and windows with rotation."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.families.qwen3_moe import dense_layers
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama = llama_layer(config, index)
    return replace(llama, mixer=replace(llama.attention, sinks=f"model.layers.{index}.self_attn.softmax_offset"))


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, head_dim=128, num_key_value_heads=4, sliding_window=513)
    if not raw.has("mlp_only_layers"):
        raw = Fields({**raw.values, "mlp_only_layers": [0, 1]}, raw.source)
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    layers = fields["layers"]
    count, top_k = read_expert_counts(raw, "num_experts", layers, default=(256, 6))
    mixture = MoeLayers(
        count,
        RoutingSpec(top_k, raw.boolean("norm_topk_prob", True), scoring="sigmoid"),
        raw.integer("moe_intermediate_size", 512),
        ExpertNames(shared_gate=None),
        dense=dense_layers(raw, layers),
        shared=raw.integer("shared_expert_intermediate_size", 1024),
        base=layer,
    )
    sliding = hf_config.layers_of_type(raw, layers, lambda index: 1 < index < layers - 1 and index % 4 != 1)
    rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"])
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        qk_norm=True,
        windows=hf_config.layer_windows(raw, sliding),
        # Layers with full attention have no positions.
        layer_ropes=tuple(rope if slides else None for slides in sliding),
        build_layer=mixture,
    )
