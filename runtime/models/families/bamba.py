"""Bamba: Mamba-2 in most layers, attention that rotates half of each head in the others."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig, llama_layer
from mycli.runtime.models.hf_rope import rotary_dim
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.mamba_layers import MambaLayers, read_mamba
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class BambaLayers:
    """Builds the layers: attention in the layers `attends`, Mamba-2 in the others, and Llama's MLP."""

    attends: frozenset[int]
    mamba: MambaLayers

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        layer, name = llama_layer(config, index), f"model.layers.{index}"
        gate, up = (
            replace(linear, name=linear.name.replace(".mlp.", ".feed_forward.")) for linear in layer.dense_mlp.gate_up
        )
        down = replace(layer.dense_mlp.down, name=f"{name}.feed_forward.down_proj")
        norm = config.norm_spec(f"{name}.pre_ff_layernorm")
        layer = replace(layer, mlp=replace(layer.dense_mlp, norm=norm, gate_up=(gate, up), down=down))
        return layer if index in self.attends else replace(layer, mixer=self.mamba.mixer(config, index))


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5, max_position_embeddings=262144, num_key_value_heads=8)
    fields = hf_config.common(raw, handled=("partial_rotary_factor",), activations=hf_config.SILU)
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        mlp_bias=raw.boolean("mlp_bias", False),
        rotary_dim=rotary_dim(raw, fields["head_dim"], 0.5),
        final_norm="model.final_layernorm",
        build_layer=BambaLayers(frozenset(raw.array("attn_layer_indices", int, MAX_LAYERS)), read_mamba(raw)),
    )
