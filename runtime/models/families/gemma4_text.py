"""Gemma 4, its text model: norms before and after each part, of query and key heads, and of values without a gain;
scores as they are; a sliding window in most layers.

Layers with full attention have longer heads, maybe fewer of them for keys, may take their keys for values, and turn
only the first pairs of a head. In the small models (E2B, E4B) the last layers read the keys and values of earlier ones,
and every layer is told of its tokens by a table of its own. In 26B-A4B experts stand beside each MLP; they, the router
and the MLP read the stream through norms of their own, and the files hold all experts of a layer in one tensor.
"""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import ExpertsSpec, RoutingSpec, SharedExpertSpec
from mycli.runtime.models.families import gemma2
from mycli.runtime.models.hf_rope import UNSUPPORTED_HINT, read_sliding_rope
from mycli.runtime.models.layer_spec import LayerSpec, PerLayerSpec
from mycli.runtime.models.part_spec import AttentionSpec, LinearSpec, MlpSpec, NormSpec, RopeSpec
from mycli.runtime.utils.json_fields import Fields

_HANDLED = ("final_logit_softcapping", "rope_parameters", "proportional", "partial_rotary_factor")
_NAMES = ExpertNames("", router="router.proj")
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


@dataclass(frozen=True)
class Layers:
    """What layers are made of. Of each: whether it slides, and the layer whose keys and values it reads, None for its
    own. `mixture`: the experts beside MLPs, if there are some."""

    slides: tuple[bool, ...]
    lenders: tuple[int | None, ...]
    full_heads: int  # for keys, in layers with full attention
    full_head_dim: int
    keys_are_values: bool
    double_wide: bool
    mixture: MoeLayers | None = None

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        """As `ModelConfig.build_layer`."""
        base, prefix, hidden = gemma2.layer(config, index), f"model.layers.{index}", config.hidden_size
        lender = self.lenders[index]
        width = config.intermediate_size * (2 if self.double_wide and lender is not None else 1)
        mlp = replace(
            base.dense_mlp,
            size=width,
            gate_up=tuple(replace(linear, out_features=width) for linear in base.dense_mlp.gate_up),
            down=replace(base.dense_mlp.down, in_features=width),
        )
        unread = () if lender is None else (f"{prefix}.self_attn.k_", f"{prefix}.self_attn.v_")
        per_layer = None
        if config.per_layer_width:
            per_layer = PerLayerSpec(
                LinearSpec(f"{prefix}.per_layer_input_gate", config.per_layer_width, hidden),
                LinearSpec(f"{prefix}.per_layer_projection", hidden, config.per_layer_width),
                config.norm_spec(f"{prefix}.post_per_layer_input_norm"),
                config.activation,
            )
        return LayerSpec(
            index,
            self._attention(config, base.attention, index),
            mlp if self.mixture is None else self._beside(self.mixture, config, mlp, base),
            per_layer=per_layer,
            layer_scalar=f"{prefix}.layer_scalar",
            ignored_prefixes=unread,
        )

    def _beside(self, mixture: MoeLayers, config: ModelConfig, mlp: MlpSpec, base: LayerSpec) -> ExpertsSpec:
        """The experts of `mixture` beside `mlp`, which all tokens go through."""
        prefix, hidden = f"model.layers.{base.index}", config.hidden_size
        experts = mixture.replace_mlp(base, config).mlp
        assert isinstance(experts, ExpertsSpec)
        after = config.norm_spec(f"{prefix}.post_feedforward_layernorm_1")
        return replace(
            experts,
            norm=None,
            shared=SharedExpertSpec(replace(mlp, output_norm=after)),
            router_norm=NormSpec(f"{prefix}.router.scale", hidden, config.rms_norm_eps, factor=hidden**-0.5, bare=True),
            expert_norm=config.norm_spec(f"{prefix}.pre_feedforward_layernorm_2"),
            expert_output_norm=config.norm_spec(f"{prefix}.post_feedforward_layernorm_2"),
            expert_scales=f"{prefix}.router.per_expert_scale",
        )

    def _attention(self, config: ModelConfig, base: AttentionSpec, index: int) -> AttentionSpec:
        lender = self.lenders[index]
        full, hidden = not self.slides[index], config.hidden_size
        kv_heads, head_dim = (self.full_heads, self.full_head_dim) if full else (config.kv_heads, config.head_dim)
        sizes = (config.heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        own = 1 if lender is not None else 2 if full and self.keys_are_values else 3
        name = f"model.layers.{index}.self_attn"
        return replace(
            base,
            kv_heads=kv_heads,
            head_dim=head_dim,
            qkv=tuple(replace(linear, out_features=size) for linear, size in zip(base.qkv[:own], sizes, strict=False)),
            q_norm=config.norm_spec(f"{name}.q_norm", head_dim),
            k_norm=None if own == 1 else config.norm_spec(f"{name}.k_norm", head_dim),
            v_norm=None if own == 1 else config.norm_spec(None, head_dim),
            o=LinearSpec(f"{name}.o_proj", hidden, sizes[0], config.output_bias),
            kv_source=lender,
            kv_shared=index in self.lenders,
        )


def _lenders(raw: Fields, slides: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The last `num_kv_shared_layers` read from the last layer of their kind before them."""
    own = len(slides) - raw.integer("num_kv_shared_layers", 0, low=0, high=len(slides) - 1)
    last = {slide: index for index, slide in enumerate(slides[:own])}
    if set(slides[own:]) - set(last):
        raise raw.fail("num_kv_shared_layers", "leaves no layer of a kind to read from")
    return (*(None for _ in range(own)), *(last[slide] for slide in slides[own:]))


def _full_heads(raw: Fields, slides: tuple[bool, ...], kv_heads: int, gated: bool) -> tuple[int, int]:
    """Heads for keys, and values of each, in layers with full attention: by name, or as transformers writes them."""
    written = raw.object("per_layer_config")
    if not written.values:
        given = raw.has("num_global_key_value_heads") and gated
        heads = raw.integer("num_global_key_value_heads", high=1 << 16) if given else kv_heads
        return heads, raw.integer("global_head_dim", 512, high=1 << 16)
    found = set()
    for index, slide in enumerate(slides):
        section = written.object(str(index))
        if set(section.values) - {"head_dim", "num_key_value_heads"} or (slide and section.values):
            raise raw.fail("per_layer_config", f"of layer {index} is not supported", UNSUPPORTED_HINT)
        if not slide:
            heads = section.integer("num_key_value_heads", kv_heads, high=1 << 16)
            found.add((heads, section.integer("head_dim", raw.integer("head_dim"), high=1 << 16)))
    if len(found) != 1:
        raise raw.fail("per_layer_config", "differs between layers of a kind", UNSUPPORTED_HINT)
    return found.pop()


def _mixture(raw: Fields, layers: int) -> MoeLayers | None:
    if not raw.boolean("enable_moe_block", False):
        return None
    count, top_k = read_expert_counts(raw, "num_experts", layers, usual=(128, 8), chosen="top_k_experts")
    return MoeLayers(count, RoutingSpec(top_k, normalize=True), raw.integer("moe_intermediate_size", 704), _NAMES)


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a Gemma 4 text config."""
    raw = hf_config.with_defaults(
        raw,
        head_dim=256,
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
    """Of a config whose defaults are filled in."""
    if not raw.has("rope_parameters"):
        raw = Fields({**raw.values, "rope_parameters": _ROPE}, raw.source)
    fields = hf_config.common(raw, handled=(*_HANDLED, *EXPERT_KEYS), activations=gemma2.GELU)
    slides = hf_config.sliding_layers(raw, fields["layers"], hf_config.every(6))
    slides = (*slides[:-1], False)  # as transformers has it, whatever layer_types says
    gated = raw.boolean("attention_k_eq_v", False)
    full_heads, full_head_dim = _full_heads(raw, slides, fields["kv_heads"], gated)
    theta, scaling = read_sliding_rope(raw, 10000.0, _HANDLED)
    near, far = (
        RopeSpec(theta, fields["head_dim"], scaling),
        RopeSpec(fields["rope_theta"], full_head_dim, fields["rope_scaling"]),
    )
    bias = raw.boolean("attention_bias", False)
    width = raw.integer("hidden_size_per_layer_input", 0, low=0)
    return ModelConfig(
        **fields,
        qkv_bias=bias,
        output_bias=bias,
        windows=hf_config.windows_of(raw, slides),
        layer_ropes=tuple(near if slide else far for slide in slides),
        attention_scale=1.0,
        logit_softcap=gemma2.softcap(raw, "final_logit_softcapping"),
        embedding_scale=fields["hidden_size"] ** 0.5,
        round_embedding_scale=True,
        per_layer_width=width,
        per_layer_vocab=raw.integer("vocab_size_per_layer_input", fields["vocab_size"]) if width else 0,
        build_layer=Layers(
            slides,
            _lenders(raw, slides),
            full_heads,
            full_head_dim,
            gated,
            raw.boolean("use_double_wide_mlp", False),
            _mixture(raw, fields["layers"]),
        ),
    )
