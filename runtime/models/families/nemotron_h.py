"""Nemotron-H and Nemotron 3 (Nano 30B-A3B): layers of one part each, Mamba-2, attention, an MLP or experts."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts, read_routing
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.mamba_layers import MambaLayers, read_plain_mamba
from mycli.runtime.utils.json_fields import Fields

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {**{kind: kind for kind in _PATTERN.values()}, "linear_attention": "mamba", "full_attention": "attention"}
_DEFAULT = ("mamba", "moe", "attention", "mlp")
# Field names of older configs, which take precedence, as in transformers.
_OLDER = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "time_step_min": "mamba_dt_min",
    "use_conv_bias": "mamba_conv_bias",
}
_NAMES = ExpertNames(
    "mixer",
    shared="shared_experts",
    shared_gate=None,
    correction_bias="gate.e_score_correction_bias",
    stacked_gate_up="experts.up_proj",
)


@dataclass(frozen=True)
class NemotronLayers:
    """Builds the layers: one part each, of the `kinds` mamba, attention, mlp and moe."""

    kinds: tuple[str, ...]
    mamba: MambaLayers
    mixture: MoeLayers

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        base, kind, name = llama_layer(config, index), self.kinds[index], f"model.layers.{index}"
        norm = config.norm_spec(f"{name}.norm")
        if kind == "mamba":
            mixer = self.mamba.mixer(config, index, "mixer")
            return LayerSpec(index, replace(mixer, norm=norm), None, ignored_prefixes=("mtp.",))
        if kind == "attention":
            parts = tuple(
                replace(linear, name=linear.name.replace("self_attn", "mixer"))
                for linear in (*base.attention.qkv, base.attention.o)
            )
            return LayerSpec(index, replace(base.attention, norm=norm, qkv=parts[:3], o=parts[3]), None)
        # Also the base of a mixture, whose builder replaces the MLP of a layer by experts.
        up, down = (replace(linear, name=linear.name.replace(".mlp.", ".mixer.")) for linear in base.dense_mlp.linears)
        layer = LayerSpec(index, None, replace(base.dense_mlp, norm=norm, gate_up=(up,), down=down))
        return self.mixture.replace_mlp(layer, config) if kind == "moe" else layer


def _read_kinds(raw: Fields) -> tuple[str, ...]:
    key = next((key for key in ("layers_block_type", "layer_types") if raw.has(key)), "hybrid_override_pattern")
    if key == "hybrid_override_pattern":
        pattern = raw.text(key, "")[:MAX_LAYERS]
        kinds = [_PATTERN.get(letter, letter) for letter in pattern] or list(_DEFAULT)
    else:
        kinds = [_KINDS.get(kind, kind) for kind in raw.array(key, str, MAX_LAYERS)]
    if not kinds or set(kinds) - set(_PATTERN.values()):
        raise raw.fail(key, f"must name layers as {', '.join(_PATTERN)} or {', '.join(_KINDS)}")
    return tuple(kinds)


def _read_mamba(raw: Fields) -> MambaLayers:
    # As transformers, which clamps steps to time_step_min and ignores time_step_limit; vLLM and llama.cpp clamp
    # nothing.
    return replace(read_plain_mamba(raw), step_limits=(raw.number("time_step_min", 0.001, low=0.0), float("inf")))


def _read_mixture(raw: Fields, layers: int) -> MoeLayers:
    count, top_k = read_expert_counts(raw, "n_routed_experts", layers, default=(8, 2))
    shared = raw.integer("moe_shared_expert_intermediate_size", 7688, low=0)
    return MoeLayers(
        count,
        read_routing(raw, count, top_k),
        raw.integer("moe_intermediate_size", 7688),
        _NAMES,
        shared=shared,
        shared_bias=raw.boolean("mlp_bias", False),
        width=raw.integer("moe_latent_size") if raw.has("moe_latent_size") else None,
    )


def read(raw: Fields) -> ModelConfig:
    kinds = _read_kinds(raw)
    older = {key: raw.values[name] for key, name in _OLDER.items() if raw.has(name)}
    raw = hf_config.with_epsilon(Fields({**raw.values, **older}, raw.source), "layer_norm_epsilon")
    raw = hf_config.with_defaults(
        raw,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=21504,
        max_position_embeddings=4096,
    )
    activation = raw.text("mlp_hidden_act", "relu2")
    raw = Fields({**raw.values, "num_hidden_layers": len(kinds), "hidden_act": activation}, raw.source)
    hf_config.require(raw, sliding_window=None, mamba_hidden_act="silu")
    fields = hf_config.common(raw, handled=EXPERT_KEYS, activations=hf_config.UNGATED_RELU)
    return ModelConfig(
        **fields,
        mlp_bias=raw.boolean("mlp_bias", False),
        mlp_gate=False,
        layer_ropes=(None,) * len(kinds),
        final_norm="model.norm_f",
        stored_prefixes=(("backbone.embeddings.", "model.embed_tokens."), ("backbone.", "model.")),
        build_layer=NemotronLayers(kinds, _read_mamba(raw), _read_mixture(raw, max(1, kinds.count("moe")))),
    )
