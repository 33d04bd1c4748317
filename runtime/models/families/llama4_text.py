"""Llama 4, text model, and MobileLLM-R1: attention in chunks, layers without rotation, experts with weighted inputs."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import ExpertsSpec, RoutingSpec, StackSpec
from mycli.runtime.models.families.smollm3 import rotating_layers
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.multimodal import SEPARATE_GATE
from mycli.runtime.models.part_spec import LinearSpec, MlpSpec, RopeScaling, RopeSpec
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames("feed_forward", router="router", shared_gate=None)


@dataclass(frozen=True)
class Llama4Layers:
    """Builds the layers. chunks: of each layer, None for full attention; dense_size: of layers without experts.

    separate: gate and up of an expert are two linears.
    """

    mixture: MoeLayers
    dense_size: int
    chunks: tuple[int | None, ...]
    head_norms: bool
    separate: bool

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        llama = llama_layer(config, index, intermediate_size=self.dense_size)
        attention, prefix = replace(llama.attention, chunk=self.chunks[index]), f"model.layers.{index}.feed_forward"
        # Queries and keys are normed after the rotation, without a gain; layers without rotation have no such norm.
        if self.head_norms and attention.rope is not None and attention.rope.dim:
            norm = config.norm_spec(None, config.head_dim)
            attention = replace(attention, q_norm=norm, k_norm=norm, norm_after_rope=True)
        mlp = llama.dense_mlp
        gate, up = (
            replace(linear, name=f"{prefix}.{name}_proj")
            for linear, name in zip(mlp.gate_up, ("gate", "up"), strict=True)
        )
        mlp = replace(mlp, gate_up=(gate, up), down=replace(mlp.down, name=f"{prefix}.down_proj"))
        layer = self.mixture.replace_mlp(replace(llama, mixer=attention, mlp=mlp), config)
        if not isinstance(layer.mlp, ExpertsSpec):
            return layer
        experts = replace(layer.mlp, weigh_inputs=True)
        return replace(layer, mlp=experts if self.separate else self._stacked(experts, prefix))

    # Checkpoints stack the transposed weights of all experts, with the columns of gate before those of up.
    def _stacked(self, spec: ExpertsSpec, prefix: str) -> ExpertsSpec:
        names = [f"{prefix}.experts.{expert}" for expert in range(self.mixture.count)]
        experts: list[MlpSpec] = []
        for name, expert in zip(names, spec.experts, strict=True):
            gate_up = LinearSpec(f"{name}.gate_up_proj", 2 * expert.size, expert.gate_up[0].in_features)
            experts.append(replace(expert, gate_up=(gate_up,)))
        stacks = tuple(
            StackSpec(
                f"{prefix}.experts.{linear}",
                tuple(f"{name}.{linear}.weight" for name in names),
                transposed=True,
                published=True,
            )
            for linear in ("gate_up_proj", "down_proj")
        )
        return replace(spec, experts=tuple(experts), stacks=stacks)


def _sparse(raw: Fields, layers: int) -> frozenset[int]:
    if raw.has("moe_layers"):
        return frozenset(raw.array("moe_layers", int, MAX_LAYERS))
    step = raw.integer("interleave_moe_layer_step", 1, low=0)
    return frozenset(range(step - 1, layers, step)) if step else frozenset()


def _ropes(raw: Fields, rotates: list[int], rope: RopeSpec) -> tuple[RopeSpec | None, ...]:
    """Return the rotary embedding of each layer; those without it scale their queries by position."""
    scaled = None
    if raw.boolean("attn_temperature_tuning", True):
        beta = raw.number("attn_scale", 0.1, low=0.0, high=1e6)
        # arXiv 2501.19399; only in layers without rotation.
        scaling = RopeScaling(original_context=raw.integer("floor_scale", 8192), query_beta=beta, query_offset=1)
        scaled = RopeSpec(1.0, 0, scaling)
    return tuple(rope if rotating else scaled for rotating in rotates)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw, head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=500000.0, attention_chunk_size=8192
    )
    fields = hf_config.common(raw, handled=("attention_chunk_size", "no_rope_layers", *EXPERT_KEYS))
    layers, rotates = fields["layers"], rotating_layers(raw, fields["layers"])
    sparse, size = _sparse(raw, layers), fields["intermediate_size"]
    # MobileLLM-R1 has no experts, and says that it has 0.
    count, top_k = read_expert_counts(raw, "num_local_experts", layers, default=(16, 1)) if sparse else (1, 1)
    mixture = MoeLayers(
        count,
        RoutingSpec(top_k, normalize=False, scoring="sigmoid"),
        size,
        _NAMES,
        dense=frozenset(range(layers)) - sparse,
        shared=size,
    )
    chunked = hf_config.layers_of_type(raw, layers, lambda index: bool(rotates[index]), "chunked_attention")
    chunk = raw.integer("attention_chunk_size") if any(chunked) else None
    rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"], interleaved=True)
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        layer_ropes=_ropes(raw, rotates, rope),
        build_layer=Llama4Layers(
            mixture,
            raw.integer("intermediate_size_mlp", 16384),
            tuple(chunk if chunks else None for chunks in chunked),
            raw.boolean("use_qk_norm", True),
            raw.boolean(SEPARATE_GATE, False),
        ),
    )
