"""SmallThinker (4B-A0.6B, 21B-A3B): ReLU-gated experts whose router reads the input of the layer, before attention."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import ExpertsSpec, RoutingSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames("block_sparse_moe", router="primary_router", gate="gate", up="up", down="down")


class SmallThinkerLayers(MoeLayers):
    """Builds the layers."""

    def replace_mlp(self, layer: LayerSpec, config: ModelConfig) -> LayerSpec:
        layer = super().replace_mlp(layer, config)
        assert isinstance(layer.mlp, ExpertsSpec)
        return replace(layer, mlp=replace(layer.mlp, early_router=True))


def _layout(raw: Fields, key: str, layers: int, default: int) -> list[int]:
    layout = raw.array(key, int, MAX_LAYERS) or [default] * layers
    if len(layout) != layers or set(layout) - {0, 1}:
        raise raw.fail(key, f"must hold 0 or 1 for each of {layers} layers")
    return layout


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw,
        head_dim=128,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
        intermediate_size=raw.integer("moe_ffn_hidden_size", 768),
    )
    # Keys of unpublished models of the same class.
    hf_config.require(raw, use_qk_norm=False, moe_enable_secondary_experts=False, moe_shared_primary_experts=0)
    hf_config.require(raw, moe_enable_early_router=True)
    fields = hf_config.common(raw, handled=EXPERT_KEYS, activations={"relu": "relu"})
    layers = fields["layers"]
    count, top_k = read_expert_counts(raw, "moe_num_primary_experts", layers, (32, 4), "moe_num_active_primary_experts")
    # Chosen by logits, in both cases: they are those of a residual stream without a norm, whose sigmoids may all be 1.
    softmax = raw.boolean("moe_primary_router_apply_softmax", False)
    routing = RoutingSpec(top_k, normalize=True, scoring="softmax" if softmax else "sigmoid_of_corrected")
    slides, rotates = _layout(raw, "sliding_window_layout", layers, 0), _layout(raw, "rope_layout", layers, 1)
    window = raw.integer("sliding_window_size", 4096)
    rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"])
    return ModelConfig(
        **fields,
        windows=tuple(window if sliding else None for sliding in slides) if any(slides) else (),
        layer_ropes=tuple(rope if rotating else None for rotating in rotates),
        build_layer=SmallThinkerLayers(count, routing, raw.integer("moe_ffn_hidden_size", 768), _NAMES),
    )
