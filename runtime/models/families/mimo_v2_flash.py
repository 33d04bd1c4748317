"""MiMo-V2-Flash (309B-A15B): windows with sinks and twice the key heads, values narrower than keys, many experts."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import (
    EXPERT_KEYS,
    ExpertNames,
    MoeLayers,
    read_dense_layers,
    read_expert_counts,
    read_routing,
)
from mycli.runtime.models.hf_rope import layer_type_ropes
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields

_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.334},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334},
}


@dataclass(frozen=True)
class MimoLayers:
    """Builds the layers. Sizes as in `AttentionSpec`."""

    value_dim: int
    value_scale: float

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        slides, name = config.window(index) is not None, f"model.layers.{index}.self_attn"
        # Windowed layers have twice the key heads and a sink for each query head.
        llama = llama_layer(config, index, kv_heads=config.kv_heads * (2 if slides else 1))
        attention = llama.attention
        query, key, value = attention.qkv
        mixer = replace(
            attention,
            qkv=(query, key, replace(value, out_features=attention.kv_heads * self.value_dim)),
            o=replace(attention.o, in_features=attention.heads * self.value_dim),
            # 128 and 192 in the published model; equal widths need no padding.
            value_dim=None if self.value_dim == config.head_dim else self.value_dim,
            value_scale=self.value_scale,
            sinks=f"{name}.attention_sink_bias" if slides else None,
        )
        return replace(llama, mixer=mixer, ignored_prefixes=("model.mtp.",))


def read(raw: Fields) -> ModelConfig:
    # Published files have this key, which counts first and leaves out the position of the query.
    if raw.has("sliding_window_size"):
        raw = Fields({**raw.values, "sliding_window": raw.integer("sliding_window_size") + 1}, raw.source)
    raw = hf_config.with_defaults(
        raw, head_dim=192, num_key_value_heads=4, sliding_window=129, rms_norm_eps=1e-5, intermediate_size=16384
    )
    raw = hf_config.with_default_rope(raw, _ROPE)
    # Published files have attention_chunk_size, which no implementation reads.
    fields = hf_config.common(
        raw, handled=("rope_parameters", "partial_rotary_factor", "attention_chunk_size", *EXPERT_KEYS)
    )
    layers, head_dim = fields["layers"], fields["head_dim"]
    sliding = hf_config.layers_of_type(raw, layers, lambda index: index != 0 and (index + 1) % 6 != 0)
    key = "num_local_experts" if raw.has("num_local_experts") else "n_routed_experts"
    count, top_k = read_expert_counts(raw, key, layers, default=(256, 8))
    scaled = raw.has("attention_value_scale") or "attention_value_scale" not in raw.values  # null for none
    value_scale = raw.number("attention_value_scale", 0.707, low=1e-6) if scaled else 1.0
    value_dim = raw.integer("v_head_dim", 128)
    if value_dim > head_dim:
        raise raw.fail("v_head_dim", f"{value_dim} is more than head_dim {head_dim}")
    mixture = MoeLayers(
        count,
        read_routing(raw, count, top_k),
        raw.integer("moe_intermediate_size", 2048),
        ExpertNames(correction_bias="gate.e_score_correction_bias"),
        dense=read_dense_layers(raw, layers, first=1),
        base=MimoLayers(value_dim, value_scale),
    )
    return ModelConfig(
        **fields,
        qkv_bias=raw.boolean("attention_bias", False),
        windows=hf_config.layer_windows(raw, sliding),
        layer_ropes=layer_type_ropes(raw, head_dim, sliding, 0.334),
        build_layer=mixture,
    )
