"""Trinity (Arcee AFM with experts): gated attention, norms around each part, windows, sigmoid-routed experts."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import GateSpec, LinearSpec, RopeSpec
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames(router="router.gate", shared="shared_experts", shared_gate=None, correction_bias="expert_bias")


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, prefix = llama_layer(config, index), f"model.layers.{index}"
    gate = LinearSpec(f"{prefix}.self_attn.gate_proj", config.heads * config.head_dim, config.hidden_size)
    after = config.norm_spec(f"{prefix}.post_attention_layernorm")
    before_mlp, after_mlp = (config.norm_spec(f"{prefix}.{name}_mlp_layernorm") for name in ("pre", "post"))
    return replace(
        llama,
        mixer=replace(llama.attention, gate=GateSpec(gate), output_norm=after),
        mlp=replace(llama.dense_mlp, norm=before_mlp, output_norm=after_mlp),
    )


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, head_dim=128, rms_norm_eps=1e-5, sliding_window=1024)
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    count, top_k = read_expert_counts(raw, "num_experts", fields["layers"], default=(64, 6))
    size = raw.integer("moe_intermediate_size", 1408)
    scale = raw.number("route_scale", 1.0, low=1e-6, high=1e6)
    mixture = MoeLayers(
        count,
        RoutingSpec(top_k, normalize=True, scoring="sigmoid", epsilon=1e-20, scale=scale),
        size,
        _NAMES,
        dense=frozenset(range(raw.integer("num_dense_layers", 1, low=0, high=fields["layers"]))),
        shared=size * raw.integer("num_shared_experts", 2, high=count),
        base=layer,
    )
    period = raw.integer("global_attn_every_n_layers", 4)
    sliding = hf_config.layers_of_type(raw, fields["layers"], hf_config.all_but_every(period))
    rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"])
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        qk_norm=True,
        windows=hf_config.layer_windows(raw, sliding),
        # Layers with full attention have no positions.
        layer_ropes=tuple(rope if slides else None for slides in sliding),
        embedding_scale=fields["hidden_size"] ** 0.5 if raw.boolean("mup_enabled", False) else 1.0,
        build_layer=mixture,
    )
