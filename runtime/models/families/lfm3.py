"""LFM3: LFM2's short convolutions, windows and attention gated by head, with norms after each part as well."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig
from mycli.runtime.models.families.lfm2 import Lfm2Layers
from mycli.runtime.models.hf_rope import layer_type_ropes
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import GateSpec, LinearSpec
from mycli.runtime.utils.json_fields import Fields

_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}


@dataclass(frozen=True)
class Lfm3Layers:
    """Builds the layers from LFM2's. sandwich: norms after each part; gated: a gate for each head of attention."""

    base: Lfm2Layers
    sandwich: bool
    gated: bool

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        layer, prefix = self.base(config, index), f"model.layers.{index}"
        if self.sandwich:
            after, after_mlp = (config.norm_spec(f"{prefix}.post_{part}_norm") for part in ("operator", "ffn"))
            assert layer.mixer is not None
            mixer, mlp = replace(layer.mixer, output_norm=after), replace(layer.dense_mlp, output_norm=after_mlp)
            layer = replace(layer, mixer=mixer, mlp=mlp)
        if layer.recurrent is not None:
            return layer
        name = f"{prefix}.self_attn"
        gate = GateSpec(LinearSpec(f"{name}.gate_proj", config.heads, config.hidden_size)) if self.gated else None
        attention = replace(
            layer.attention,
            q_norm=config.norm_spec(f"{name}.q_norm", config.head_dim),
            k_norm=config.norm_spec(f"{name}.k_norm", config.head_dim),
            o=replace(layer.attention.o, name=f"{name}.o_proj"),
            gate=gate,
        )
        return replace(layer, mixer=attention)


def _types(raw: Fields, layers: int) -> list[str]:
    def default(index: int) -> str:
        return "full_attention" if index % 4 == 2 else "sliding_attention" if index % 4 == 0 and index > 0 else "conv"

    types = raw.array("layer_types", str, MAX_LAYERS) or [default(index) for index in range(layers)]
    if len(types) != layers or set(types) - {"conv", "full_attention", "sliding_attention"}:
        raise raw.fail("layer_types", f"must be conv, full_attention or sliding_attention for each of {layers} layers")
    return types


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_epsilon(raw, "norm_eps")
    raw = hf_config.with_defaults(
        raw, head_dim=128, num_key_value_heads=4, sliding_window=256, tie_word_embeddings=True
    )
    raw = hf_config.with_default_rope(raw, _ROPE)
    fields = hf_config.common(raw, handled=("rope_parameters", "partial_rotary_factor", "proportional"))
    types = _types(raw, fields["layers"])
    sliding = tuple(name == "sliding_attention" for name in types)
    ropes = layer_type_ropes(raw, fields["head_dim"], sliding, handled=("proportional",))
    if any(rope.dim != fields["head_dim"] for rope in ropes):  # transformers rotates whole heads then
        raise raw.fail("rope_parameters", "has a partial_rotary_factor with another rope_type than proportional")
    convolutions = Lfm2Layers(
        tuple(name == "conv" for name in types),
        raw.integer("conv_L_cache", 7, low=2, high=64),
        raw.boolean("conv_bias", False),
    )
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        windows=hf_config.layer_windows(raw, sliding),
        layer_ropes=ropes,
        final_norm="model.embedding_norm",
        build_layer=Lfm3Layers(
            convolutions, raw.boolean("use_sandwich_norm", True), raw.boolean("use_attention_gate", True)
        ),
    )
