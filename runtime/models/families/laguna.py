"""Laguna: attention gated by softplus, query heads by layer, windows, sigmoid-routed experts and a shared expert."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_dense_layers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.hf_rope import layer_type_ropes
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import GateSpec, LinearSpec
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames(shared_gate=None, correction_bias="experts.e_score_correction_bias")
_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}


@dataclass(frozen=True)
class LagunaLayers:
    """Builds the layers. heads: query heads of each layer; head_gates: a gate for each head, not for each value."""

    heads: tuple[int, ...]
    head_gates: bool

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        # Query heads may differ by layer, key heads do not: the cache has one shape.
        llama, name = llama_layer(config, index, heads=self.heads[index]), f"model.layers.{index}.self_attn"
        rows = self.heads[index] * (1 if self.head_gates else config.head_dim)
        gate = GateSpec(LinearSpec(f"{name}.g_proj", rows, config.hidden_size), "softplus")
        return replace(llama, mixer=replace(llama.attention, gate=gate))


def _heads(raw: Fields, heads: int, layers: int) -> tuple[int, ...]:
    by_layer = raw.array("num_attention_heads_per_layer", int, MAX_LAYERS) or [heads] * layers
    if len(by_layer) != layers or not all(0 < count < 1 << 16 for count in by_layer):
        raise raw.fail("num_attention_heads_per_layer", f"must hold a number of heads for each of {layers} layers")
    return tuple(by_layer)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, head_dim=128, num_key_value_heads=8, sliding_window=512)
    raw = hf_config.with_default_rope(raw, _ROPE)
    hf_config.require(raw, moe_apply_router_weight_on_input=False)
    fields = hf_config.common(raw, handled=("rope_parameters", "partial_rotary_factor", *EXPERT_KEYS))
    count, top_k = read_expert_counts(raw, "num_experts", fields["layers"], default=(256, 8))
    routing = RoutingSpec(
        top_k,
        normalize=True,
        scoring="sigmoid",
        scale=raw.number("moe_routed_scaling_factor", 1.0, low=1e-6, high=1e6),
        softcap=raw.number("moe_router_logit_softcapping", 0.0, low=0.0, high=1e6),
    )
    gating = raw.values.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        raise raw.fail("gating", f"= {gating!r:.40} is not supported")
    mixture = MoeLayers(
        count,
        routing,
        raw.integer("moe_intermediate_size", 512),
        _NAMES,
        dense=read_dense_layers(raw, fields["layers"], first=1),
        shared=raw.integer("shared_expert_intermediate_size", 512),
        base=LagunaLayers(_heads(raw, fields["heads"], fields["layers"]), gating != "per-element"),
    )
    sliding = hf_config.layers_of_type(raw, fields["layers"])
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        qk_norm=True,
        windows=hf_config.layer_windows(raw, sliding),
        layer_ropes=layer_type_ropes(raw, fields["head_dim"], sliding),
        build_layer=mixture,
    )
