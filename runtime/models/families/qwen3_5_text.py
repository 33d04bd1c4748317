"""Qwen 3.5 and 3.6, dense, their text model: Gated DeltaNet in three layers of four, in the fourth attention with gated
outputs, which turns a quarter of each head; norms of query and key heads, and gains of 1 + w."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.decoder_layer import decoder_layer
from mycli.runtime.models.hf_rope import rotary_dim
from mycli.runtime.models.layer_spec import LayerSpec, LinearSpec, NormSpec
from mycli.runtime.models.recurrent_spec import ConvolutionSpec, DeltaNetSpec
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class DeltaLayers:
    """What layers are made of. Of each: whether it keeps a state. The sizes are those of `DeltaNetSpec`."""

    recurrent: tuple[bool, ...]
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: int

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        """As `ModelConfig.declare`."""
        base = decoder_layer(config, index)
        unread = ("mtp.",)  # a head that predicts several tokens
        if self.recurrent[index]:
            return replace(base, mixer=self._delta(config, index), unread=unread)
        query, *others = base.attention.qkv
        wide = replace(query, out_features=2 * query.out_features)
        return replace(base, mixer=replace(base.attention, qkv=(wide, *others), gated=True), unread=unread)

    def _delta(self, config: ModelConfig, index: int) -> DeltaNetSpec:
        layer, hidden = f"model.layers.{index}", config.hidden_size
        name, inner = f"{layer}.linear_attn", self.heads * self.value_dim
        channels = 2 * self.key_heads * self.key_dim + inner
        return DeltaNetSpec(
            self.heads,
            self.key_heads,
            self.key_dim,
            self.value_dim,
            norm=config.norm_of(f"{layer}.input_layernorm"),
            projections=(
                LinearSpec(f"{name}.in_proj_qkv", channels, hidden),
                LinearSpec(f"{name}.in_proj_z", inner, hidden),
            ),
            gates=(
                LinearSpec(f"{name}.in_proj_b", self.heads, hidden),
                LinearSpec(f"{name}.in_proj_a", self.heads, hidden),
            ),
            convolution=ConvolutionSpec(f"{name}.conv1d", channels, self.taps),
            decay=f"{name}.A_log",
            dt_bias=f"{name}.dt_bias",
            head_norm=NormSpec(f"{name}.norm", self.value_dim, config.rms_norm_eps),
            out=LinearSpec(f"{name}.out_proj", hidden, inner),
        )


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a Qwen 3.5 text config."""
    raw = hf_config.with_defaults(
        raw,
        head_dim=256,
        max_position_embeddings=32768,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
    )
    fields = hf_config.common(raw, handled=("partial_rotary_factor",))
    period = raw.integer("full_attention_interval", 4)
    bias = raw.boolean("attention_bias", False)
    heads, key_heads = (raw.integer(f"linear_num_{kind}_heads", high=1 << 16) for kind in ("value", "key"))
    if heads % key_heads:
        raise raw.fail("linear_num_value_heads", f"{heads} is not a multiple of linear_num_key_heads {key_heads}")
    return ModelConfig(
        **fields,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        rotary_dim=rotary_dim(raw, fields["head_dim"], 0.25),
        norm_offset=1.0,
        declare=DeltaLayers(
            hf_config.layers_of_kind(raw, fields["layers"], "linear_attention", hf_config.every(period)),
            heads,
            key_heads,
            raw.integer("linear_key_head_dim", high=1 << 10),
            raw.integer("linear_value_head_dim", high=1 << 10),
            raw.integer("linear_conv_kernel_dim", low=2, high=64),
        ),
    )
