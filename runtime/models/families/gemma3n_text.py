"""Gemma 3n (E2B, E4B), text model: four residual streams, per-layer inputs, and MLPs whose small gates are zero."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig
from mycli.runtime.models.families import gemma2
from mycli.runtime.models.families.gemma4_text import base_layer, read_kv_sources
from mycli.runtime.models.hf_rope import read_sliding_rope
from mycli.runtime.models.layer_spec import LaurelSpec, LayerSpec, StreamsSpec
from mycli.runtime.models.part_spec import AttentionSpec, LinearSpec, RopeSpec
from mycli.runtime.utils.json_fields import Fields

_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # of published models
_MOST_STREAMS = 64


@dataclass(frozen=True)
class Gemma3nLayers:
    """Builds the layers. sizes, sparsities: of the MLP of each layer; kv_sources: as in Gemma 4."""

    sizes: tuple[int, ...]
    sparsities: tuple[float, ...]
    kv_sources: tuple[int | None, ...]
    active: int
    laurel_rank: int
    scales: bool  # whether the gate of per-layer inputs reads the active stream times a tensor

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        base = base_layer(config, index, self.sizes[index], self.kv_sources[index])
        laurel, hidden = f"model.layers.{index}.laurel", config.hidden_size
        return replace(
            base,
            mixer=self._attention(config, base.attention, index),
            mlp=replace(base.dense_mlp, sparsity=self.sparsities[index]),
            laurel=LaurelSpec(
                LinearSpec(f"{laurel}.linear_left", self.laurel_rank, hidden),
                LinearSpec(f"{laurel}.linear_right", hidden, self.laurel_rank),
                config.norm_spec(f"{laurel}.post_laurel_norm"),
            ),
            streams=self._streams(config, f"model.layers.{index}.altup"),
        )

    def _streams(self, config: ModelConfig, name: str) -> StreamsSpec:
        hidden, count = config.hidden_size, config.streams
        return StreamsSpec(
            count,
            self.active,
            replace(config.norm_spec(f"{name}.router_norm"), factor=1 / hidden),
            router=LinearSpec(f"{name}.modality_router", count, hidden),
            prediction=LinearSpec(f"{name}.prediction_coefs", count**2, count),
            correction=LinearSpec(f"{name}.correction_coefs", count, count),
            scale=f"{name}.correct_output_scale",
            scales=self.scales,
        )

    def _attention(self, config: ModelConfig, base: AttentionSpec, index: int) -> AttentionSpec:
        kv_source = self.kv_sources[index]
        if kv_source is not None:
            return replace(base, qkv=base.qkv[:1], k_norm=None, kv_source=kv_source)
        return replace(base, v_norm=config.norm_spec(None, config.head_dim), kv_shared=index in self.kv_sources)


def _by_layer(raw: Fields, key: str, layers: int) -> tuple[float, ...]:
    values = raw.array(key, object, MAX_LAYERS)
    if len(values) != layers:
        raise raw.fail(key, f"has {len(values)} numbers for {layers} layers")
    return tuple(Fields({key: value}, raw.source).number(key, low=0.0) for value in values)


def _sizes(raw: Fields, layers: int) -> tuple[int, ...]:
    if not isinstance(raw.values.get("intermediate_size"), Sequence):
        return (raw.integer("intermediate_size"),) * layers
    values = raw.array("intermediate_size", int, MAX_LAYERS)
    if len(values) != layers:
        raise raw.fail("intermediate_size", f"has {len(values)} numbers for {layers} layers")
    return tuple(Fields({"intermediate_size": value}, raw.source).integer("intermediate_size") for value in values)


def _sparsities(raw: Fields, layers: int) -> tuple[float, ...]:
    if not raw.has("activation_sparsity_pattern"):
        sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
        return (_SPARSITY,) * sparse + (0.0,) * (layers - sparse)
    shares = _by_layer(raw, "activation_sparsity_pattern", layers)
    if max(shares) >= 1.0:
        raise raw.fail("activation_sparsity_pattern", "has a share that is not below 1")
    return shares


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw,
        vocab_size=262400,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        max_position_embeddings=32768,
        sliding_window=512,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        tie_word_embeddings=True,
        eos_token_id=1,
        bos_token_id=2,
        final_logit_softcapping=30.0,
        num_kv_shared_layers=15,
    )
    layers = raw.integer("num_hidden_layers", high=MAX_LAYERS)
    sizes = _sizes(raw, layers)
    plain = Fields({**raw.values, "intermediate_size": max(sizes)}, raw.source)
    handled = ("final_logit_softcapping", "rope_parameters")
    fields = hf_config.common(plain, handled=handled, activations=gemma2.GELU)
    slides = hf_config.layers_of_type(raw, layers, hf_config.all_but_every(5))
    theta, scaling = read_sliding_rope(raw, raw.number("rope_local_base_freq"))
    sliding_rope = RopeSpec(theta, fields["head_dim"], scaling)
    full_rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"])
    streams = raw.integer("altup_num_inputs", 4, low=2, high=_MOST_STREAMS)
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        qk_norm=True,
        windows=hf_config.layer_windows(raw, slides),
        layer_ropes=tuple(sliding_rope if slide else full_rope for slide in slides),
        attention_scale=1.0,
        logit_softcap=gemma2.softcap(raw, "final_logit_softcapping"),
        embedding_scale=fields["hidden_size"] ** 0.5,
        round_embedding_scale=True,
        per_layer_width=raw.integer("hidden_size_per_layer_input", 256),
        per_layer_vocab=raw.integer("vocab_size_per_layer_input", 262144),
        streams=streams,
        build_layer=Gemma3nLayers(
            sizes,
            _sparsities(raw, layers),
            read_kv_sources(raw, slides),
            raw.integer("altup_active_idx", 0, low=0, high=streams - 1),
            raw.integer("laurel_rank", 64),
            raw.boolean("altup_correct_scale", True),
        ),
    )
