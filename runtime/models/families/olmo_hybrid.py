"""OLMo Hybrid (7B): Gated DeltaNet in three layers of four, OLMo 2's attention in the fourth."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.families import olmo2
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, NormSpec
from mycli.runtime.models.recurrent_spec import ConvolutionSpec, DeltaNetSpec
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class HybridLayers:
    """Builds the layers. Sizes and `beta_scale` as in `DeltaNetSpec`."""

    recurrent: tuple[bool, ...]
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: int
    beta_scale: float

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        prefix = f"model.layers.{index}"
        mlp_norm = config.norm_spec(f"{prefix}.feedforward_layer_norm")
        if not self.recurrent[index]:
            layer = olmo2.layer(config, index)
            return replace(layer, mixer=replace(layer.attention, output_norm=mlp_norm))
        llama = llama_layer(config, index)
        return replace(llama, mixer=self._delta(config, prefix), mlp=replace(llama.dense_mlp, norm=mlp_norm))

    def _delta(self, config: ModelConfig, prefix: str) -> DeltaNetSpec:
        name, hidden = f"{prefix}.linear_attn", config.hidden_size
        key, inner = self.key_heads * self.key_dim, self.heads * self.value_dim
        widths = {"q": key, "k": key, "v": inner, "g": inner}
        parts = tuple((f"{name}.{part}_conv1d", widths[part]) for part in "qkv")
        return DeltaNetSpec(
            self.heads,
            self.key_heads,
            self.key_dim,
            self.value_dim,
            norm=config.norm_spec(f"{prefix}.attention_layer_norm"),
            projections=tuple(LinearSpec(f"{name}.{part}_proj", width, hidden) for part, width in widths.items()),
            gates=tuple(LinearSpec(f"{name}.{part}_proj", self.heads, hidden) for part in "ba"),
            # transformers holds one convolution over q, k and v; checkpoints hold three.
            convolution=ConvolutionSpec(f"{name}.conv1d", 2 * key + inner, self.taps, parts=parts),
            decay=f"{name}.A_log",
            dt_bias=f"{name}.dt_bias",
            # Its eps is fixed, not rms_norm_eps.
            head_norm=NormSpec(f"{name}.o_norm", self.value_dim, 1e-5),
            out=LinearSpec(f"{name}.o_proj", hidden, inner),
            beta_scale=self.beta_scale,
        )


def read(raw: Fields) -> ModelConfig:
    fields = hf_config.common(raw, activations=hf_config.SILU)
    heads, hidden, layers = fields["heads"], fields["hidden_size"], fields["layers"]
    key_heads = raw.integer("linear_num_key_heads", heads, high=1 << 16)
    value_heads = raw.integer("linear_num_value_heads", heads, high=1 << 16)
    if value_heads % key_heads:
        raise raw.fail("linear_num_value_heads", f"{value_heads} is not a multiple of linear_num_key_heads {key_heads}")
    key_dim = raw.integer("linear_key_head_dim", max(1, int(0.75 * hidden / key_heads)), high=1 << 10)
    recurrent = hf_config.layers_of_type(raw, layers, lambda index: index % 4 != 3, "linear_attention")
    if all(recurrent) and not raw.has("layer_types"):
        recurrent = (*recurrent[:-1], False)  # the family's default has one layer with attention at least
    # A theta of null says that attention has no positions, as in transformers.
    rope = {**raw.values, **raw.object("rope_parameters").values}
    rotates = rope.get("rope_theta", 0) is not None
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        layer_ropes=() if rotates else (None,) * layers,
        build_layer=HybridLayers(
            recurrent,
            value_heads,
            key_heads,
            key_dim,
            raw.integer("linear_value_head_dim", 2 * key_dim, high=1 << 10),
            raw.integer("linear_conv_kernel_dim", 4, low=2, high=64),
            2.0 if raw.boolean("linear_allow_neg_eigval", True) else 1.0,
        ),
    )
