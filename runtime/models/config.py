"""What a model is, as numbers: the one frozen description that every part reads by field name.

Knows the shape of every tensor of the decoder families supported here, and how config.json reaches the family that
reads it. Does not import torch, and does not know where a file lies or which tensors are quantized.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from mycli.runtime.errors import ModelError
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import (
    ActivationName,
    AttentionSpec,
    LinearSpec,
    MlpSpec,
    NormSpec,
    RopeScaling,
    RopeSpec,
    Shape,
)
from mycli.runtime.utils.dtypes import Dtype

KvDtype = Literal["auto", "bf16", "int8", "int4"]  # how the cache holds keys and values; auto: as they are computed

MAX_LAYERS = 4096
MAX_ELEMENTS = 1 << 40  # of one tensor; beyond it a config is a mistake or an attack


def llama_layer(config: "ModelConfig", index: int) -> LayerSpec:
    """A layer of the Llama kind: a norm before each part, q, k, v, gate and up each a tensor of its own."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    up = LinearSpec(f"{mlp}.up_proj", inner, hidden, config.mlp_bias)
    gate = LinearSpec(f"{mlp}.gate_proj", inner, hidden, config.mlp_bias)
    return LayerSpec(
        index,
        AttentionSpec(
            heads=config.heads,
            kv_heads=config.kv_heads,
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
            residual_scale=config.residual_scale,
        ),
        MlpSpec(
            size=inner,
            norm=config.norm_spec(f"{prefix}.post_attention_layernorm"),
            gate_up=(up,) if config.activation == "relu2" else (gate, up),
            down=LinearSpec(f"{mlp}.down_proj", hidden, inner, config.mlp_bias),
            activation=config.activation,
            residual_scale=config.residual_scale,
        ),
    )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: what its layers are made of, and what stands before and behind them.

    `declare` is the family's: what each layer is made of, from the fields here. `rope_theta`, `rope`, `rotary_dim`
    (None: all of a head) and `interleaved` say how heads are turned; where layers differ, `rotations` does, one for
    each layer, None for none. `norm_offset`: added to every stored gain. Embeddings are multiplied by
    `embedding_scale`, rounded to the dtype of activations first if `rounds_scale`; logits by `logit_scale`, and a
    `logit_softcap` c then makes them c tanh(. / c). `per_layer_width`: values that each layer is told of a token by a
    table of `per_layer_vocab` rows, 0 where layers are told nothing. `final_norm` names the norm after the last layer.

    `predict` makes the config of the head that predicts one token further, where the family has one: a model of one
    layer that `joins` two inputs, and has the vocabulary of the other model; `runtime.speculative` runs it.
    """

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
    rope_scaling: RopeScaling
    tie_embeddings: bool
    dtype: Dtype
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window per layer; empty: none anywhere
    eos: tuple[int, ...] = ()
    bos: int | None = None
    build_layer: Callable[["ModelConfig", int], LayerSpec] = llama_layer
    activation: ActivationName = "silu"
    rotary_dim: int | None = None
    interleaved: bool = False
    layer_ropes: tuple[RopeSpec | None, ...] = ()
    norm_offset: float = 0.0
    layer_norm: bool = False  # norms take the mean away first
    attention_scale: float | None = None
    attention_softcap: float | None = None
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    round_embedding_scale: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    per_layer_width: int = 0
    per_layer_vocab: int = 0
    final_norm: str = "model.norm"
    build_mtp: Callable[["ModelConfig"], "ModelConfig"] | None = None
    is_mtp: bool = False

    def __post_init__(self) -> None:
        for attention in self.attentions:
            _check_attention(attention)
        for name, shape in self.tensors():
            elements = 1
            for size in shape:
                elements *= size
            if elements > MAX_ELEMENTS:
                raise ModelError(f"config.json: {name} would have {elements} elements", "the file may be damaged")

    def window(self, layer: int) -> int | None:
        """The sliding window of `layer` in tokens (a query sees itself and window - 1 before it), None for all."""
        return self.windows[layer] if self.windows else None

    def layer_rope(self, layer: int) -> RopeSpec | None:
        """How `layer` turns queries and keys; None where it does not."""
        if self.layer_ropes:
            return self.layer_ropes[layer]
        return RopeSpec(self.rope_theta, self.rotary_dim or self.head_dim, self.rope_scaling, self.interleaved)

    def norm_spec(self, name: str | None, size: int | None = None) -> NormSpec:
        """A norm of the model's kind over `size` values, None for the residual stream."""
        return NormSpec(name, size or self.hidden_size, self.rms_norm_eps, self.norm_offset, self.layer_norm)

    @cached_property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """What every layer is made of."""
        return tuple(self.build_layer(self, index) for index in range(self.layers))

    @cached_property
    def mtp(self) -> "ModelConfig | None":
        """The head that predicts one token further, where the family has one."""
        return None if self.build_mtp is None else self.build_mtp(self)

    @cached_property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Of the layers that attend, in order."""
        return tuple(layer.attention for layer in self.layer_specs if layer.recurrent is None)

    @cached_property
    def has_recurrent(self) -> bool:
        """Whether layers keep a state."""
        return len(self.attentions) < self.layers

    @cached_property
    def distinct_windows(self) -> frozenset[int | None]:
        """The kinds of windows that layers have."""
        return frozenset(attention.window for attention in self.attentions)

    @cached_property
    def distinct_ropes(self) -> tuple[RopeSpec, ...]:
        """The kinds of rotation that layers have."""
        found = (attention.rope for attention in self.attentions)
        return tuple(dict.fromkeys(rope for rope in found if rope is not None))

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Key heads, and values of each, that `layer` keeps of a token; no heads where it keeps none."""
        if self.layer(layer).recurrent is not None:
            return 0, self.head_dim
        spec = self.layer(layer).attention
        return (spec.kv_heads if spec.kv_source is None else 0), spec.head_dim

    @cached_property
    def has_side_inputs(self) -> bool:
        """Whether layers read more than the residual stream: what they are told, or what another layer lends."""
        return self.per_layer_width > 0 or any(attention.kv_shared for attention in self.attentions)

    @cached_property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """How the names of tensors begin that files may hold though nothing reads them."""
        return tuple(prefix for layer in self.layer_specs for prefix in layer.ignored_prefixes)

    @cached_property
    def stacked_tensors(self) -> dict[str, tuple[str, ...]]:
        """The tensors that files may have for those of all experts of a layer, with their parts in order."""
        mixtures = (layer.mlp for layer in self.layer_specs if isinstance(layer.mlp, ExpertsSpec))
        return {stack.name: stack.parts for mixture in mixtures for stack in mixture.stacks}

    def layer(self, index: int) -> LayerSpec:
        """What layer `index` is made of."""
        return self.layer_specs[index]

    def block_linears(self, layer: int) -> dict[str, tuple[LinearSpec, ...]]:
        """The linears of one block by the product they are part of, in order of execution."""
        return self.layer(layer).products()

    def linears(self) -> Iterator[LinearSpec]:
        """Every linear that may be stored quantized, in order of execution; the head too, unless it is tied."""
        for index in range(self.layers):
            for linears in self.layer(index).products().values():
                yield from linears
        if not self.tie_embeddings and not self.is_mtp:
            yield self.head()

    def mtp_inputs(self) -> tuple[NormSpec, NormSpec, LinearSpec]:
        """Of a model that joins two inputs: the norms of embedding and hidden state, and what makes one of the two."""
        join = LinearSpec("fc", self.hidden_size, 2 * self.hidden_size)
        return self.norm_spec("pre_fc_norm_embedding"), self.norm_spec("pre_fc_norm_hidden"), join

    def norms(self) -> tuple[NormSpec, ...]:
        """The norms outside of layers."""
        told = (self.per_layer_norm(),) if self.per_layer_width else ()
        return (self.norm(), *told, *(self.mtp_inputs()[:2] if self.is_mtp else ()))

    def norm(self) -> NormSpec:
        """The norm after the last layer."""
        return self.norm_spec(self.final_norm)

    def per_layer_linears(self) -> tuple[LinearSpec, ...]:
        """What lies in memory of what layers are told: a table and a projection, or nothing."""
        return (self.per_layer_table(), self.per_layer_projection()) if self.per_layer_width else ()

    def per_layer_table(self) -> LinearSpec:
        """What all layers are told of each token, side by side: a table, seen as a linear."""
        return LinearSpec("model.embed_tokens_per_layer", self.per_layer_vocab, self.layers * self.per_layer_width)

    def per_layer_projection(self) -> LinearSpec:
        """What is told beside, of the embedding."""
        width = self.layers * self.per_layer_width
        return LinearSpec("model.per_layer_model_projection", width, self.hidden_size)

    def per_layer_norm(self) -> NormSpec:
        """The norm of what is told of the embedding, layer by layer."""
        return self.norm_spec("model.per_layer_projection_norm", self.per_layer_width)

    def head(self) -> LinearSpec:
        """The output projection; with tied embeddings its weight is `model.embed_tokens.weight`."""
        return LinearSpec("lm_head", self.vocab_size, self.hidden_size)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Names and shapes of all tensors of the unquantized model, as the family's checkpoints store them."""
        if self.is_mtp:
            *norms, join = self.mtp_inputs()
            for norm in norms:
                yield norm.tensor, (norm.size,)
            yield f"{join.name}.weight", (join.out_features, join.in_features)
        else:
            yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        for linear in self.per_layer_linears():
            yield f"{linear.name}.weight", (linear.out_features, linear.in_features)
        if self.per_layer_width:
            yield self.per_layer_norm().tensor, (self.per_layer_width,)
        for layer in range(self.layers):
            yield from self.layer(layer).tensors()
        yield self.norm().tensor, (self.hidden_size,)
        if not self.tie_embeddings and not self.is_mtp:
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    def parameters(self) -> int:
        """How many numbers the unquantized model holds."""
        total = 0
        for _, shape in self.tensors():
            elements = 1
            for size in shape:
                elements *= size
            total += elements
        return total

    def active_parameters(self) -> int:
        """Of `parameters` those that one token meets: without the experts that it does not go through."""
        mixtures = [spec.mlp for spec in self.layer_specs if isinstance(spec.mlp, ExpertsSpec)]
        return self.parameters() - sum(mixture.inactive_experts * mixture.parameters_per_expert for mixture in mixtures)


def _check_attention(spec: AttentionSpec) -> None:
    if spec.kv_heads > spec.heads or spec.heads % spec.kv_heads:
        raise ModelError(
            f"config.json: num_key_value_heads {spec.kv_heads} does not divide num_attention_heads {spec.heads}",
            "the file may be damaged",
        )
    if spec.head_dim % 2 or (spec.rope is not None and spec.rope.dim % 2):
        raise ModelError(f"config.json: head_dim {spec.head_dim} is odd; rotary positions need pairs", "")
    if spec.rope is not None and spec.rope.scaling.kind == "longrope":
        for key, factors in (
            ("short_factor", spec.rope.scaling.short_factors),
            ("long_factor", spec.rope.scaling.long_factors),
        ):
            if len(factors) != spec.rope.dim // 2:
                raise ModelError(f"config.json: {key} has {len(factors)} numbers for {spec.rope.dim // 2} pairs", "")
