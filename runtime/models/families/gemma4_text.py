"""Gemma 4, text model: norms before and after each part, per-head norms of q and k, and of v without a gain."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import ExpertsSpec, RoutingSpec, SharedExpertSpec
from mycli.runtime.models.families import gemma2
from mycli.runtime.models.hf_rope import UNSUPPORTED_HINT, read_sliding_rope
from mycli.runtime.models.layer_spec import LayerSpec, PerLayerSpec
from mycli.runtime.models.part_spec import AttentionSpec, LinearSpec, NormSpec, RopeSpec
from mycli.runtime.utils.json_fields import Fields

_HANDLED = ("final_logit_softcapping", "rope_parameters", "proportional", "partial_rotary_factor")
_NAMES = ExpertNames("", router="router.proj", stacked=True)
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


@dataclass(frozen=True)
class Gemma4Layers:
    """Builds the layers. kv_sources: the layer whose keys and values each layer reads, None for its own."""

    slides: tuple[bool, ...]
    kv_sources: tuple[int | None, ...]
    full_kv_heads: int  # layers with full attention may have fewer key-value heads ...
    full_head_dim: int  # ... of a larger size, and use keys as values
    keys_are_values: bool
    double_wide: bool  # MLPs of layers that read the keys and values of others are twice as wide
    mixture: MoeLayers | None = None

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        kv_source = self.kv_sources[index]
        size = config.intermediate_size * (2 if self.double_wide and kv_source is not None else 1)
        base = base_layer(config, index, size, kv_source)
        return replace(
            base,
            mixer=self._attention(config, base.attention, index),
            mlp=base.mlp if self.mixture is None else self._parallel_experts(self.mixture, config, base),
            layer_scalar=f"model.layers.{index}.layer_scalar",
        )

    # 26B-A4B: MLP and experts in parallel; they and the router read the residual stream through norms of their own.
    def _parallel_experts(self, mixture: MoeLayers, config: ModelConfig, base: LayerSpec) -> ExpertsSpec:
        prefix, hidden = f"model.layers.{base.index}", config.hidden_size
        experts = mixture.replace_mlp(base, config).mlp
        assert isinstance(experts, ExpertsSpec)
        after = config.norm_spec(f"{prefix}.post_feedforward_layernorm_1")
        return replace(
            experts,
            norm=None,
            shared=SharedExpertSpec(replace(base.dense_mlp, output_norm=after)),
            router_norm=NormSpec(f"{prefix}.router.scale", hidden, config.rms_norm_eps, factor=hidden**-0.5, bare=True),
            expert_norm=config.norm_spec(f"{prefix}.pre_feedforward_layernorm_2"),
            expert_output_norm=config.norm_spec(f"{prefix}.post_feedforward_layernorm_2"),
            expert_scales=f"{prefix}.router.per_expert_scale",
        )

    def _attention(self, config: ModelConfig, base: AttentionSpec, index: int) -> AttentionSpec:
        kv_source = self.kv_sources[index]
        full, hidden = not self.slides[index], config.hidden_size
        kv_heads, head_dim = (self.full_kv_heads, self.full_head_dim) if full else (config.kv_heads, config.head_dim)
        sizes = (config.heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        linears = 1 if kv_source is not None else 2 if full and self.keys_are_values else 3  # q; q, k; q, k, v
        name = f"model.layers.{index}.self_attn"
        return replace(
            base,
            kv_heads=kv_heads,
            head_dim=head_dim,
            qkv=tuple(replace(base.qkv[part], out_features=sizes[part]) for part in range(linears)),
            q_norm=config.norm_spec(f"{name}.q_norm", head_dim),
            k_norm=None if linears == 1 else config.norm_spec(f"{name}.k_norm", head_dim),
            v_norm=None if linears == 1 else config.norm_spec(None, head_dim),
            o=LinearSpec(f"{name}.o_proj", hidden, sizes[0], config.output_bias),
            kv_source=kv_source,
            kv_shared=index in self.kv_sources,
        )


def base_layer(config: ModelConfig, index: int, size: int, kv_source: int | None) -> LayerSpec:
    """Return a layer of Gemma 2 with an MLP of `size`; E2B, E4B and Gemma 3n have per-layer inputs too."""
    layer, prefix, hidden = gemma2.layer(config, index), f"model.layers.{index}", config.hidden_size
    mlp, per_layer = layer.dense_mlp, None
    if config.per_layer_width:
        per_layer = PerLayerSpec(
            LinearSpec(f"{prefix}.per_layer_input_gate", config.per_layer_width, hidden),
            LinearSpec(f"{prefix}.per_layer_projection", hidden, config.per_layer_width),
            config.norm_spec(f"{prefix}.post_per_layer_input_norm"),
            config.activation,
        )
    gate_up = tuple(replace(linear, out_features=size) for linear in mlp.gate_up)
    return replace(
        layer,
        mlp=replace(mlp, size=size, gate_up=gate_up, down=replace(mlp.down, in_features=size)),
        per_layer=per_layer,
        ignored_prefixes=() if kv_source is None else (f"{prefix}.self_attn.k_", f"{prefix}.self_attn.v_"),
    )


def read_kv_sources(raw: Fields, slides: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Return the layer whose keys and values each layer reads, None for its own."""
    # The last num_kv_shared_layers read from the last layer of their kind before them.
    first = len(slides) - raw.integer("num_kv_shared_layers", 0, low=0, high=len(slides) - 1)
    last = {slide: index for index, slide in enumerate(slides[:first])}
    if set(slides[first:]) - set(last):
        raise raw.fail("num_kv_shared_layers", "leaves no layer of a kind to read from")
    return (*(None for _ in range(first)), *(last[slide] for slide in slides[first:]))


def _full_heads(raw: Fields, slides: tuple[bool, ...], kv_heads: int, keys_are_values: bool) -> tuple[int, int]:
    """Return (kv_heads, head_dim) of layers with full attention."""
    per_layer = raw.object("per_layer_config")  # as transformers saves a config; published files have the other keys
    if not per_layer.values:
        has_heads = raw.has("num_global_key_value_heads") and keys_are_values
        heads = raw.integer("num_global_key_value_heads", high=1 << 16) if has_heads else kv_heads
        return heads, raw.integer("global_head_dim", 512, high=1 << 16)
    keys = {int(key): key for key in per_layer.values if key.isdecimal()}  # "05" from eleven layers on
    if len(keys) < len(per_layer.values):
        raise raw.fail("per_layer_config", "names something else than layers, or a layer twice")
    sizes = set()
    for index, slide in enumerate(slides):
        section = per_layer.object(keys.get(index, str(index)))
        if set(section.values) - {"head_dim", "num_key_value_heads"} or (slide and section.values):
            raise raw.fail("per_layer_config", f"of layer {index} is not supported", UNSUPPORTED_HINT)
        if not slide:
            heads = section.integer("num_key_value_heads", kv_heads, high=1 << 16)
            sizes.add((heads, section.integer("head_dim", raw.integer("head_dim"), high=1 << 16)))
    if len(sizes) != 1:
        raise raw.fail("per_layer_config", "differs between layers with full attention", UNSUPPORTED_HINT)
    return sizes.pop()


def _mixture(raw: Fields, layers: int) -> MoeLayers | None:
    if not raw.boolean("enable_moe_block", False):
        return None
    count, top_k = read_expert_counts(raw, "num_experts", layers, default=(128, 8), top_k_key="top_k_experts")
    return MoeLayers(count, RoutingSpec(top_k, normalize=True), raw.integer("moe_intermediate_size", 704), _NAMES)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw,
        head_dim=256,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        sliding_window=512,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262144,
        tie_word_embeddings=True,
        eos_token_id=1,
        bos_token_id=2,
    )
    return read_gemma4(raw)


def read_gemma4(raw: Fields) -> ModelConfig:
    """Read a Gemma 4 config whose defaults are filled in."""
    if not raw.has("rope_parameters"):
        raw = Fields({**raw.values, "rope_parameters": _ROPE}, raw.source)
    fields = hf_config.common(raw, handled=(*_HANDLED, *EXPERT_KEYS), activations=gemma2.GELU)
    slides = hf_config.layers_of_type(raw, fields["layers"], hf_config.all_but_every(6))
    slides = (*slides[:-1], False)  # transformers gives the last layer full attention, whatever layer_types says
    keys_are_values = raw.boolean("attention_k_eq_v", False)
    full_kv_heads, full_head_dim = _full_heads(raw, slides, fields["kv_heads"], keys_are_values)
    theta, scaling = read_sliding_rope(raw, 10000.0, _HANDLED)
    sliding_rope = RopeSpec(theta, fields["head_dim"], scaling)
    full_rope = RopeSpec(fields["rope_theta"], full_head_dim, fields["rope_scaling"])
    width = raw.integer("hidden_size_per_layer_input", 0, low=0)
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        windows=hf_config.layer_windows(raw, slides),
        layer_ropes=tuple(sliding_rope if slide else full_rope for slide in slides),
        attention_scale=1.0,
        logit_softcap=gemma2.softcap(raw, "final_logit_softcapping"),
        embedding_scale=fields["hidden_size"] ** 0.5,
        round_embedding_scale=True,
        per_layer_width=width,
        per_layer_vocab=raw.integer("vocab_size_per_layer_input", fields["vocab_size"]) if width else 0,
        build_layer=Gemma4Layers(
            slides,
            read_kv_sources(raw, slides),
            full_kv_heads,
            full_head_dim,
            keys_are_values,
            raw.boolean("use_double_wide_mlp", False),
            _mixture(raw, fields["layers"]),
        ),
    )
