"""Muse Glimmer (30B), text model: gated attention with scaled queries, four norms, windows, capped logits."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig, llama_layer
from mycli.runtime.models.families import gemma2
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import GateSpec, LinearSpec, NormSpec, RopeSpec
from mycli.runtime.utils.json_fields import Fields

# Set by the reader of GGUF, where norms of queries and keys have gains that include `qk_scale_factor`.
QK_NORM_GAINS = "qk_norm_gains"


@dataclass(frozen=True)
class MuseLayers:
    """Builds the layers. query_scale: of normed queries; post_norm_eps: of the norms after attention and MLP."""

    query_scale: float
    post_norm_eps: float
    qk_norm_gains: bool

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        llama, prefix = llama_layer(config, index), f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        gate = LinearSpec(f"{attention}.gate_proj", config.heads * config.head_dim, config.hidden_size)

        def norm(name: str, eps: float = config.rms_norm_eps) -> NormSpec:
            return NormSpec(f"{prefix}.{name}_layernorm", config.hidden_size, eps, offset=1.0)

        def head_norm(name: str, factor: float) -> NormSpec:
            stored = f"{attention}.{name}_norm" if self.qk_norm_gains else None
            return NormSpec(stored, config.head_dim, config.rms_norm_eps, factor=1.0 if stored else factor)

        mixer = replace(
            llama.attention,
            norm=norm("input"),
            q_norm=head_norm("q", self.query_scale),
            k_norm=head_norm("k", 1.0),
            gate=GateSpec(gate),
            output_norm=norm("post_attention", self.post_norm_eps),
        )
        mlp = replace(
            llama.dense_mlp,
            norm=norm("pre_feedforward"),
            output_norm=norm("post_feedforward", self.post_norm_eps),
        )
        return replace(llama, mixer=mixer, mlp=mlp)


def _rotated(raw: Fields, full: tuple[bool, ...]) -> tuple[bool, ...]:
    # A base of 0 says that a layer does not rotate; other values are not read, as in transformers.
    bases = raw.array("layer_rope_theta", object, MAX_LAYERS)
    if not bases:
        return tuple(not whole for whole in full)
    if len(bases) != len(full):
        raise raw.fail("layer_rope_theta", f"has {len(bases)} entries for {len(full)} layers")
    return tuple(bool(base) for base in bases)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw,
        head_dim=128,
        rms_norm_eps=1e-5,
        sliding_window=2048,
        final_logit_softcapping=20.0,
        num_key_value_heads=2,
    )
    fields = hf_config.common(raw, handled=("final_logit_softcapping",), activations=hf_config.SILU)
    layers = fields["layers"]
    # The last layer and each fourth before it have full attention.
    full = tuple((layers - 1 - index) % 4 == 0 for index in range(layers))
    sliding = hf_config.layers_of_type(raw, layers, lambda index: not full[index])
    rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"])
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        windows=hf_config.layer_windows(raw, sliding),
        layer_ropes=tuple(rope if rotated else None for rotated in _rotated(raw, full)),
        embedding_norm=True,
        logit_scale=raw.number("output_multiplier", 0.19611613513818404, low=1e-9),
        logit_softcap=gemma2.softcap(raw, "final_logit_softcapping"),
        build_layer=MuseLayers(
            raw.number("qk_scale_factor", 3.87, low=1e-6),
            raw.number("post_norm_eps", 1e-8, low=1e-30, high=1.0),
            raw.boolean(QK_NORM_GAINS, False),
        ),
    )
