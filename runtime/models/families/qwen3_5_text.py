"""Qwen 3.5 and 3.6, dense, text model: Gated DeltaNet in three layers of four, gated attention in the fourth."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, MoeLayers
from mycli.runtime.models.hf_rope import rotary_dim
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, NormSpec
from mycli.runtime.models.recurrent_spec import ConvolutionSpec, DeltaNetSpec
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class DeltaLayers:
    """Builds the layers: Gated DeltaNet where `recurrent`, else attention with gated outputs.

    Sizes as in `DeltaNetSpec`. fused: one tensor for all projections and one for the gates. mixture: experts in place
    of MLPs, or None.
    """

    recurrent: tuple[bool, ...]
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: int
    fused: bool = False
    mixture: MoeLayers | None = None

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        base = llama_layer(config, index)
        if self.mixture is not None:
            base = self.mixture.replace_mlp(base, config)
        unread = ("mtp.",)  # the MTP head is a model of its own
        if self.recurrent[index]:
            return replace(base, mixer=self._delta(config, index), ignored_prefixes=unread)
        query, *others = base.attention.qkv
        query = replace(query, out_features=2 * query.out_features)
        return replace(base, mixer=replace(base.attention, qkv=(query, *others), gated=True), ignored_prefixes=unread)

    def _delta(self, config: ModelConfig, index: int) -> DeltaNetSpec:
        layer, hidden = f"model.layers.{index}", config.hidden_size
        name, inner = f"{layer}.linear_attn", self.heads * self.value_dim
        channels = 2 * self.key_heads * self.key_dim + inner
        projected, gates = {"qkv": channels, "z": inner}, {"b": self.heads, "a": self.heads}
        if self.fused:
            projected, gates = {"qkvz": channels + inner}, {"ba": 2 * self.heads}
        return DeltaNetSpec(
            self.heads,
            self.key_heads,
            self.key_dim,
            self.value_dim,
            norm=config.norm_spec(f"{layer}.input_layernorm"),
            projections=tuple(LinearSpec(f"{name}.in_proj_{part}", size, hidden) for part, size in projected.items()),
            gates=tuple(LinearSpec(f"{name}.in_proj_{part}", size, hidden) for part, size in gates.items()),
            convolution=ConvolutionSpec(f"{name}.conv1d", channels, self.taps),
            decay=f"{name}.A_log",
            dt_bias=f"{name}.dt_bias",
            head_norm=NormSpec(f"{name}.norm", self.value_dim, config.rms_norm_eps),
            out=LinearSpec(f"{name}.out_proj", hidden, inner),
            by_key_head=self.fused,
        )


def mtp_config(config: ModelConfig) -> ModelConfig:
    """Return the config of the MTP head: one layer with attention."""
    declare = config.build_layer
    assert isinstance(declare, DeltaLayers)
    mixture = declare.mixture and replace(declare.mixture, dense=frozenset())
    layers = replace(declare, recurrent=(False,), mixture=mixture)
    return replace(config, layers=1, build_layer=layers, build_mtp=None, is_mtp=True)


def with_delta_defaults(raw: Fields, kv_heads: int) -> Fields:
    return hf_config.with_defaults(
        raw,
        head_dim=256,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
    )


def read_delta(raw: Fields, mixture: MoeLayers | None = None, *, fused: bool = False) -> ModelConfig:
    """Read a config whose defaults are filled in; `mixture` and `fused` as in `DeltaLayers`."""
    handled = ("partial_rotary_factor", *(() if mixture is None else EXPERT_KEYS))
    fields = hf_config.common(raw, handled=handled, activations=hf_config.SILU)
    period = raw.integer("full_attention_interval", 4)
    heads, key_heads = (raw.integer(f"linear_num_{kind}_heads", high=1 << 16) for kind in ("value", "key"))
    if heads % key_heads:
        raise raw.fail("linear_num_value_heads", f"{heads} is not a multiple of linear_num_key_heads {key_heads}")
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        qk_norm=True,
        rotary_dim=rotary_dim(raw, fields["head_dim"], 0.25),
        norm_offset=1.0,
        build_mtp=mtp_config,
        build_layer=DeltaLayers(
            hf_config.layers_of_type(raw, fields["layers"], hf_config.all_but_every(period), "linear_attention"),
            heads,
            key_heads,
            raw.integer("linear_key_head_dim", high=1 << 10),
            raw.integer("linear_value_head_dim", high=1 << 10),
            raw.integer("linear_conv_kernel_dim", low=2, high=64),
            fused,
            mixture,
        ),
    )


def read(raw: Fields) -> ModelConfig:
    return read_delta(with_delta_defaults(raw, 4))
