"""Jamba (1.5 Mini, Reasoning 3B, Jamba2 3B): Mamba-1 in most layers, attention without rotation, experts in some."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.mamba_layers import SelectiveLayers, read_rank
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames("feed_forward", router="router")
_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


@dataclass(frozen=True)
class JambaLayers:
    """Builds the layers: attention in the layers `attends`, Mamba-1 in the others; mixture: the experts, if any."""

    attends: frozenset[int]
    mamba: SelectiveLayers
    mixture: MoeLayers | None

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        layer, name = llama_layer(config, index), f"model.layers.{index}"
        gate, up, down = (
            replace(linear, name=linear.name.replace(".mlp.", ".feed_forward.")) for linear in layer.dense_mlp.linears
        )
        norm = config.norm_spec(f"{name}.pre_ff_layernorm")
        layer = replace(layer, mlp=replace(layer.dense_mlp, norm=norm, gate_up=(gate, up), down=down))
        if index not in self.attends:
            layer = replace(layer, mixer=self.mamba.mixer(config, index, "mamba"))
        return layer if self.mixture is None else self.mixture.replace_mlp(layer, config)


def _every(raw: Fields, kind: str, layers: int, period: int, offset: int) -> frozenset[int]:
    """Return the layers of a kind: one in each `<kind>_layer_period`, from `<kind>_layer_offset`."""
    period = raw.integer(f"{kind}_layer_period", period)
    return frozenset(range(raw.integer(f"{kind}_layer_offset", offset, low=0, high=period - 1), layers, period))


def _read_mixture(raw: Fields, size: int, layers: int) -> MoeLayers | None:
    if 1 in (raw.values.get("num_experts"), raw.values.get("num_local_experts")):
        return None  # whatever num_experts_per_tok is
    count, top_k = read_expert_counts(raw, "num_experts", layers, default=(16, 2))
    dense = frozenset(range(layers)) - _every(raw, "expert", layers, 2, 1)
    return MoeLayers(count, RoutingSpec(top_k, normalize=False), size, _NAMES, dense=dense)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, max_position_embeddings=262144, num_key_value_heads=8)
    hf_config.require(raw, mamba_inner_layernorms=True, sliding_window=None)
    fields = hf_config.common(raw, handled=EXPERT_KEYS, activations=hf_config.SILU)
    layers = fields["layers"]
    mamba = SelectiveLayers(
        raw.integer("mamba_expand", 2, high=64) * fields["hidden_size"],
        raw.integer("mamba_d_state", 16, high=1 << 16),
        read_rank(raw, "mamba_dt_rank"),
        raw.integer("mamba_d_conv", 4, low=2, high=64),
        raw.boolean("mamba_proj_bias", False),
        raw.boolean("mamba_conv_bias", True),
        _NORMS,
        fields["rms_norm_eps"],
        norm="input_layernorm",
    )
    return ModelConfig(
        **fields,
        layer_ropes=(None,) * layers,
        final_norm="model.final_layernorm",
        build_layer=JambaLayers(
            _every(raw, "attn", layers, 8, 4), mamba, _read_mixture(raw, fields["intermediate_size"], layers)
        ),
    )
