"""The frozen description of a model that every other part reads: sizes, layers, names and shapes of tensors.

Independent of files, quantization and torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.models.experts_spec import ExpertsSpec, StackSpec
from mycli.runtime.models.latent_spec import LatentAttentionSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.memory_names import file_name
from mycli.runtime.models.part_spec import (
    ActivationName,
    AttentionSpec,
    ClassifierSpec,
    LinearSpec,
    MlpSpec,
    NormSpec,
    PositionSpec,
    RopeScaling,
    RopeSpec,
    Shape,
)
from mycli.runtime.utils.dtypes import Dtype

KvDtype = Literal["auto", "bf16", "int8", "int4"]  # dtype of the KV cache; auto: the dtype of activations

MAX_LAYERS = 4096
MAX_ELEMENTS = 1 << 40  # per tensor; a config that asks for more is damaged or an attack


def llama_layer(
    config: "ModelConfig",
    index: int,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
) -> LayerSpec:
    """Return a Llama layer: pre-norms; q, k, v, gate and up are separate tensors. Families replace what differs.

    The numbers are those of `config` unless they are given.
    """
    hidden, inner = config.hidden_size, intermediate_size or config.intermediate_size
    heads, kv_heads = heads or config.heads, kv_heads or config.kv_heads
    query, key = heads * config.head_dim, kv_heads * config.head_dim
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    up = LinearSpec(f"{mlp}.up_proj", inner, hidden, config.mlp_bias)
    gate = LinearSpec(f"{mlp}.gate_proj", inner, hidden, config.mlp_bias)
    return LayerSpec(
        index,
        AttentionSpec(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=config.head_dim,
            window=config.window(index),
            norm=config.norm_spec(f"{prefix}.input_layernorm"),
            qkv=(
                LinearSpec(f"{attention}.q_proj", query, hidden, config.qkv_bias),
                LinearSpec(f"{attention}.k_proj", key, hidden, config.qkv_bias),
                LinearSpec(f"{attention}.v_proj", key, hidden, config.qkv_bias),
            ),
            q_norm=config.norm_spec(f"{attention}.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=config.norm_spec(f"{attention}.k_norm", config.head_dim) if config.qk_norm else None,
            o=LinearSpec(f"{attention}.o_proj", hidden, query, config.output_bias),
            rope=config.layer_rope(index),
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            clip=config.attention_clip,
            residual_scale=config.residual_scale,
        ),
        MlpSpec(
            size=inner,
            norm=config.norm_spec(f"{prefix}.post_attention_layernorm"),
            gate_up=(gate, up) if config.mlp_gate else (up,),
            down=LinearSpec(f"{mlp}.down_proj", hidden, inner, config.mlp_bias),
            activation=config.activation,
            residual_scale=config.residual_scale,
        ),
    )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer."""

    model_type: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling  # with theta, rotary_dim and interleaved: the rotary embedding of all layers
    tie_embeddings: bool
    dtype: Dtype
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window of each layer in tokens; empty: none has one
    eos: tuple[int, ...] = ()
    bos: int | None = None
    build_layer: Callable[["ModelConfig", int], LayerSpec] = llama_layer  # layer by index
    activation: ActivationName = "silu"
    mlp_gate: bool = True
    rotary_dim: int | None = None  # None: head_dim
    interleaved: bool = False
    layer_ropes: tuple[RopeSpec | None, ...] = ()  # where layers differ, one each; None for no rotation
    norm_offset: float = 0.0  # added to every stored norm weight: 1 in Gemma
    layer_norm: bool = False  # norms subtract the mean first
    norm_bias: bool = False
    norm_gain: bool = True  # False: norms have no tensors
    attention_scale: float | None = None
    attention_softcap: float | None = None
    attention_clip: float | None = None
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    round_embedding_scale: bool = False  # to the activation dtype, as Gemma does
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # c: logits become c tanh(logit / c)
    per_layer_width: int = 0  # per-layer inputs (Gemma 4): columns per layer ...
    per_layer_vocab: int = 0  # ... and rows of their table
    streams: int = 1  # residual streams side by side, see `StreamsSpec`
    final_norm: str | None = "model.norm"  # None: a norm without a tensor
    # Prefixes of tensors in files and in this declaration, where they differ; the first that matches counts.
    stored_prefixes: tuple[tuple[str, str], ...] = ()
    embedding_norm: bool = False  # embeddings pass a norm without a tensor before the first layer
    head_bias: bool = False
    # The multi-token prediction head where the family has one: one layer that reads a projection of embedding and
    # hidden state, with this model's embedding and head.
    build_mtp: Callable[["ModelConfig"], "ModelConfig"] | None = None
    is_mtp: bool = False
    positions: PositionSpec | None = None
    bidirectional: bool = False  # every token sees the whole text: the model has no cache and generates nothing
    classifier: ClassifierSpec | None = None  # of a reranker; other bidirectional models compute embeddings

    def __post_init__(self) -> None:
        for attention in self.attentions:
            _check_attention(attention)
        for name, shape in self.tensors():
            if prod(shape) > MAX_ELEMENTS:
                raise ModelError(f"config.json: {name} would have {prod(shape)} elements", "the file may be damaged")

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a query of `layer` sees, itself included; None for all."""
        return self.windows[layer] if self.windows else None

    def layer_rope(self, layer: int) -> RopeSpec | None:
        """Return the rotary embedding of `layer`; None where it has none."""
        if self.layer_ropes:
            return self.layer_ropes[layer]
        return RopeSpec(self.rope_theta, self.rotary_dim or self.head_dim, self.rope_scaling, self.interleaved)

    def norm_spec(self, name: str | None, size: int | None = None) -> NormSpec:
        """Return a norm of the model's kind over `size` values, by default hidden_size."""
        name = name if self.norm_gain else None
        width, bias = size or self.hidden_size, self.norm_bias and name is not None
        return NormSpec(name, width, self.rms_norm_eps, self.norm_offset, self.layer_norm, bias=bias)

    @cached_property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        return tuple(self.build_layer(self, index) for index in range(self.layers))

    @cached_property
    def mtp(self) -> "ModelConfig | None":
        """The config of the multi-token prediction head; None where the family has none."""
        return None if self.build_mtp is None else self.build_mtp(self)

    @cached_property
    def attentions(self) -> tuple[AttentionSpec | LatentAttentionSpec, ...]:
        attending = (AttentionSpec, LatentAttentionSpec)
        return tuple(layer.mixer for layer in self.layer_specs if isinstance(layer.mixer, attending))

    @cached_property
    def has_recurrent(self) -> bool:
        return any(layer.recurrent is not None for layer in self.layer_specs)

    @cached_property
    def distinct_windows(self) -> frozenset[int | None]:
        return frozenset(attention.window for attention in self.attentions)

    def windowed(self, layer: int) -> bool:
        """Return whether tokens of `layer` see a limited number of positions: a sliding window, or chunks."""
        spec = self.layer(layer).mixer
        return isinstance(spec, AttentionSpec) and (spec.window or spec.chunk) is not None

    @cached_property
    def longest_window(self) -> int | None:
        """The most positions that a token sees in such layers; None without them, or without a cache."""
        mixers = (layer.mixer for layer in self.layer_specs if not self.bidirectional)
        windows = (mixer.window or mixer.chunk for mixer in mixers if isinstance(mixer, AttentionSpec))
        return max((window for window in windows if window is not None), default=None)

    @cached_property
    def distinct_ropes(self) -> tuple[RopeSpec, ...]:
        ropes = (attention.rope for attention in self.attentions)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    def cache_shapes(self, layer: int) -> tuple[Shape, ...]:
        """Return (vectors, heads, size) of each tensor that caches tokens of `layer`; 0 heads where it caches none.

        Keys and values are one tensor of two vectors per head; a latent and its rotated values are a tensor each.
        """
        spec = self.layer(layer).mixer
        if self.bidirectional:
            return ((2, 0, self.head_dim),)
        if isinstance(spec, LatentAttentionSpec):
            # Two tensors, not one of 576 values: the rotated values of DeepSeek are tens of times larger than the
            # normed latent, and with one int8 scale for both they would leave it few levels.
            return (1, 1, spec.rank), (1, 1, spec.rope_dim)
        if not isinstance(spec, AttentionSpec):
            return ((2, 0, self.head_dim),)
        return ((2, spec.kv_heads if spec.kv_source is None else 0, spec.head_dim),)

    @property
    def purpose(self) -> str:
        """The work of a bidirectional model, which generates no text."""
        return "computes embeddings" if self.classifier is None else "scores pairs of texts"

    @property
    def stream_width(self) -> int:
        """Number of values of a token between layers."""
        return self.streams * self.hidden_size

    @cached_property
    def has_side_inputs(self) -> bool:
        """Layers read more than one residual stream: others, per-layer inputs, or keys and values of another layer."""
        shared = any(attention.kv_shared for attention in self.attentions)
        return shared or self.per_layer_width > 0 or self.streams > 1

    @cached_property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """Prefixes of tensor names that checkpoints may contain and nothing reads."""
        return tuple(prefix for layer in self.layer_specs for prefix in layer.ignored_prefixes)

    @cached_property
    def stacks(self) -> dict[str, StackSpec]:
        """The checkpoint tensors that stack all experts of a layer, by name."""
        mixtures = (layer.mlp for layer in self.layer_specs if isinstance(layer.mlp, ExpertsSpec))
        return {stack.name: stack for mixture in mixtures for stack in mixture.stacks}

    def local_name(self, stored: str) -> str:
        """Return the declaration's name of a tensor of the family's files, or of transformers' model in memory."""
        stored = file_name(self.model_type, stored)
        for prefix, local in self.stored_prefixes:
            if stored.startswith(prefix):
                return local + stored.removeprefix(prefix)
        return stored

    def stored_name(self, name: str) -> str:
        """Return the checkpoints' name of a tensor; the inverse of `local_name`."""
        for prefix, local in self.stored_prefixes:
            if name.startswith(local):
                return prefix + name.removeprefix(local)
        return name

    def module_names(self, name: str) -> tuple[str, ...]:
        """Return the declaration's name of a module, then the checkpoints' if it differs."""
        return tuple(dict.fromkeys((name, self.stored_name(f"{name}.").removesuffix("."))))

    def layer(self, index: int) -> LayerSpec:
        return self.layer_specs[index]

    def linears(self) -> Iterator[LinearSpec]:
        """Yield every linear that may be quantized, in order of execution; the head too, unless it is tied."""
        for index in range(self.layers):
            for linears in self.layer(index).products().values():
                yield from linears
        if not self.tie_embeddings and not self.is_mtp:
            yield self.head()

    def mtp_inputs(self) -> tuple[NormSpec, NormSpec, LinearSpec]:
        """Return the MTP head's norms of embedding and hidden state, and the projection of both to one input."""
        projection = LinearSpec("fc", self.hidden_size, 2 * self.hidden_size)
        return self.norm_spec("pre_fc_norm_embedding"), self.norm_spec("pre_fc_norm_hidden"), projection

    def norms(self) -> tuple[NormSpec, ...]:
        """Return the norms outside of layers."""
        per_layer = (self.per_layer_norm(),) if self.per_layer_width else ()
        head = () if self.classifier is None or self.classifier.norm is None else (self.classifier.norm,)
        return (self.norm(), *per_layer, *head, *(self.mtp_inputs()[:2] if self.is_mtp else ()))

    def norm(self) -> NormSpec:
        return self.norm_spec(self.final_norm)

    def per_layer_linears(self) -> tuple[LinearSpec, ...]:
        """Return the linears that compute per-layer inputs, none where layers have no such inputs."""
        return (self.per_layer_table(), self.per_layer_projection()) if self.per_layer_width else ()

    def per_layer_table(self) -> LinearSpec:
        """Return the table of per-layer inputs, one row per token with all layers side by side, as a linear."""
        return LinearSpec("model.embed_tokens_per_layer", self.per_layer_vocab, self.layers * self.per_layer_width)

    def per_layer_projection(self) -> LinearSpec:
        """Return the projection of the token embedding that is added to the table's row."""
        width = self.layers * self.per_layer_width
        return LinearSpec("model.per_layer_model_projection", width, self.hidden_size)

    def per_layer_norm(self) -> NormSpec:
        return self.norm_spec("model.per_layer_projection_norm", self.per_layer_width)

    def stream_linears(self) -> tuple[tuple[LinearSpec, ...], tuple[LinearSpec, ...]]:
        """Return the projections from the embedding to each stream but the first, and from these to the output."""
        size, others = self.hidden_size, range(self.streams - 1)
        enter, leave = (
            tuple(LinearSpec(f"model.{name}.{index}", size, size) for index in others)
            for name in ("altup_projections", "altup_unembed_projections")
        )
        return enter, leave

    def position_tables(self) -> tuple[LinearSpec, ...]:
        """Return the tables of positions and token types as linears, none where the family has none."""
        spec = self.positions
        tables = () if spec is None else (spec.table, spec.types, spec.distances)
        return tuple(table for table in tables if table is not None)

    def dense_linears(self) -> tuple[LinearSpec, ...]:
        """Return the linears outside of layers that are never quantized."""
        enter, leave = self.stream_linears()
        head = () if self.classifier is None else (self.classifier.dense, self.classifier.out)
        return (*self.per_layer_linears()[1:], *self.position_tables(), *enter, *leave, *head)

    def unquantized_linears(self) -> Iterator[LinearSpec]:
        """Yield the linears that are never quantized: those outside of layers, then routers and gates."""
        yield from self.dense_linears()
        for layer in self.layer_specs:
            yield from layer.unquantized

    def head(self) -> LinearSpec:
        """Return the output projection; with tied embeddings its weight is `model.embed_tokens.weight`."""
        return LinearSpec("lm_head", self.vocab_size, self.hidden_size, self.head_bias)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of each tensor of the unquantized model, as the family's checkpoints store them."""
        if self.is_mtp:
            *norms, projection = self.mtp_inputs()
            for norm in norms:
                yield from norm.tensors()
            yield f"{projection.name}.weight", (projection.out_features, projection.in_features)
        else:
            yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        for linear in (*self.per_layer_linears()[:1], *self.dense_linears()):
            yield f"{linear.name}.weight", (linear.out_features, linear.in_features)
            if linear.bias:
                yield f"{linear.name}.bias", (linear.out_features,)
        if self.per_layer_width:
            yield from self.per_layer_norm().tensors()
        for layer in range(self.layers):
            yield from self.layer(layer).tensors()
        yield from self.norm().tensors()
        if self.classifier is not None and self.classifier.norm is not None:
            yield from self.classifier.norm.tensors()
        if not self.tie_embeddings and not self.is_mtp:
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)
            if self.head_bias:
                yield "lm_head.bias", (self.vocab_size,)

    def parameters(self) -> int:
        """Return the number of parameters of the unquantized model."""
        return sum(prod(shape) for _, shape in self.tensors())

    def active_parameters(self) -> int:
        """Return the number of parameters that one token uses: without the experts that it is not routed to."""
        mixtures = [spec.mlp for spec in self.layer_specs if isinstance(spec.mlp, ExpertsSpec)]
        return self.parameters() - sum(mixture.inactive_experts * mixture.parameters_per_expert for mixture in mixtures)


def not_generative(config: ModelConfig) -> UsageError:
    """Return the error for asking text of a bidirectional model."""
    code = "embedding-model" if config.classifier is None else "reranker"
    return UsageError(f"this model {config.purpose}: its attention is bidirectional", code=code)


def _check_attention(spec: AttentionSpec | LatentAttentionSpec) -> None:
    if spec.kv_heads > spec.heads or spec.heads % spec.kv_heads:
        raise ModelError(
            f"config.json: num_key_value_heads {spec.kv_heads} does not divide num_attention_heads {spec.heads}",
            "the file may be damaged",
        )
    if spec.head_dim % 2:
        raise ModelError(f"config.json: head_dim {spec.head_dim} is odd; rotary embedding rotates pairs of values", "")
    if spec.rope is not None and spec.rope.dim % 2:
        share = f"{spec.rope.dim} of {spec.head_dim} values of a head"
        raise ModelError(f"config.json: partial_rotary_factor rotates {share}; rotary embedding rotates pairs", "")
    if spec.rope is not None and spec.rope.scaling.kind == "longrope":
        for key, factors in (
            ("short_factor", spec.rope.scaling.short_factors),
            ("long_factor", spec.rope.scaling.long_factors),
        ):
            if len(factors) != spec.rope.dim // 2:
                raise ModelError(f"config.json: {key} has {len(factors)} numbers for {spec.rope.dim // 2} pairs", "")
