"""Falcon-H1 (0.5B to 34B): attention and Mamba-2 side by side in every layer, with multipliers of each part."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.mamba_layers import MambaLayers, read_mamba
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.models.recurrent_spec import MambaSpec
from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class FalconLayers:
    """Builds the layers. attention, state_space: factors of input and output; mlp: factors of gate and output."""

    # Factors become fields that other families have, too: of the norm before a product, and of the addition to the
    # residual stream after it.
    mamba: MambaLayers
    normed: bool  # Mamba-2 normalizes its output
    norm_first: bool  # before the gate, not after it
    out_bias: bool
    attention: tuple[float, float]
    state_space: tuple[float, float]
    mlp: tuple[float, float]
    multipliers: tuple[float, ...]  # as in `MambaSpec`

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        base, name = llama_layer(config, index), f"model.layers.{index}"
        norm = config.norm_spec(f"{name}.input_layernorm")
        gate, up, down = (
            replace(linear, name=linear.name.replace(".mlp.", ".feed_forward.")) for linear in base.dense_mlp.linears
        )
        attention = replace(
            base.attention, norm=replace(norm, factor=self.attention[0]), residual_scale=self.attention[1]
        )
        mlp = replace(
            base.dense_mlp,
            norm=config.norm_spec(f"{name}.pre_ff_layernorm"),
            gate_up=(gate, up),
            down=down,
            gate_scale=self.mlp[0],
            residual_scale=self.mlp[1],
        )
        return LayerSpec(index, attention, mlp, state_space=self._mamba(config, index))

    def _mamba(self, config: ModelConfig, index: int) -> MambaSpec:
        mixer = self.mamba.mixer(config, index)
        assert mixer.norm is not None
        return replace(
            mixer,
            norm=replace(mixer.norm, factor=self.state_space[0]),
            residual_scale=self.state_space[1],
            multipliers=() if set(self.multipliers) == {1.0} else self.multipliers,
            gated_norm=mixer.gated_norm if self.normed else None,
            norm_first=self.normed and self.norm_first,
            out=LinearSpec(mixer.out.name, mixer.out.out_features, mixer.out.in_features, self.out_bias),
        )


def _factor(raw: Fields, key: str) -> float:
    return raw.number(key, 1.0, low=-1e6, high=1e6)


def _factors(raw: Fields, key: str, count: int) -> tuple[float, ...]:
    values = raw.array(key, object, count) or [1.0] * count
    if len(values) != count or not all(isinstance(value, int | float) for value in values):
        raise raw.fail(key, f"must be {count} numbers")
    return tuple(float(value) for value in values if isinstance(value, int | float))


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5, max_position_embeddings=8192, num_key_value_heads=8)
    fields = hf_config.common(raw, handled=("embedding_multiplier",), activations=hf_config.SILU)
    gate, down = _factors(raw, "mlp_multipliers", 2)
    # transformers' default is 1024; null stands for the multiple of hidden_size.
    expanded = raw.values.get("mamba_d_ssm", 1024) is None
    layers = FalconLayers(
        read_mamba(raw, inner=None if expanded else raw.integer("mamba_d_ssm", 1024)),
        raw.boolean("mamba_rms_norm", False),
        raw.boolean("mamba_norm_before_gate", True),
        raw.boolean("projectors_bias", False),
        (_factor(raw, "attention_in_multiplier"), _factor(raw, "attention_out_multiplier")),
        (_factor(raw, "ssm_in_multiplier"), _factor(raw, "ssm_out_multiplier")),
        (gate, down),
        _factors(raw, "ssm_multipliers", 5),
    )
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        mlp_bias=raw.boolean("mlp_bias", False),
        # Scores are linear in the keys, so their multiplier goes into the scale.
        attention_scale=_factor(raw, "key_multiplier") * fields["head_dim"] ** -0.5,
        embedding_scale=_factor(raw, "embedding_multiplier"),
        logit_scale=_factor(raw, "lm_head_multiplier"),
        final_norm="model.final_layernorm",
        build_layer=layers,
    )
