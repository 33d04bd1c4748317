"""The parts of a decoder layer as a checkpoint names them: norms, linears, rotary embedding, attention, MLP.

Names, shapes and constants only, without torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Shape = tuple[int, ...]
# xielu has parameters and no gate; in swiglu_clamped (gpt-oss) rows of gate and up alternate; swiglu_halves is the same
# function of all rows of gate before those of up.
ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped", "swiglu_halves", "xielu"]
RopeKind = Literal["default", "linear", "dynamic", "ntk", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True)
class NormSpec:
    """A norm with the gain (`offset` + tensor `name` [size]) * `factor`; without a name, gain `factor`.

    heads: 0, or the number of neighbouring vectors with a gain each: tensors `<name>.<index>.weight` (StableLM), or one
    tensor [heads, size] if `stacked` (Command R+). pairs: the norm follows an interleaved rotation of whole heads,
    which returns value 2i at i and 2i + 1 at i + size / 2; the tensor has the order before it.
    """

    name: str | None
    size: int
    eps: float
    offset: float = 0.0
    layer_norm: bool = False  # LayerNorm: subtract the mean first; otherwise RMSNorm
    factor: float = 1.0
    bare: bool = False  # the tensor is called `name`, not `<name>.weight`
    bias: bool = False  # tensor `<name>.bias` [size], added last; only with `layer_norm`
    heads: int = 0
    stacked: bool = False
    pairs: bool = False

    @property
    def tensor(self) -> str:
        assert self.name is not None
        return self.name if self.bare else f"{self.name}.weight"

    @property
    def bias_tensor(self) -> str:
        return f"{self.name}.bias"

    @property
    def elements(self) -> int:
        """Number of values in memory: gains and biases."""
        return self.size * (max(1, self.heads) + self.bias)

    @property
    def head_tensors(self) -> tuple[str, ...]:
        return () if self.stacked else tuple(f"{self.name}.{head}.weight" for head in range(self.heads))

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of each stored tensor."""
        if self.name is not None and not self.head_tensors:
            yield self.tensor, ((self.heads, self.size) if self.stacked else (self.size,))
        yield from ((name, (self.size,)) for name in self.head_tensors)
        if self.bias:
            yield self.bias_tensor, (self.size,)

    @property
    def fp32_gain(self) -> bool:
        """Whether the gain is kept in fp32: 1 + w in bf16 would round away the small w of Gemma and Qwen 3.5."""
        return bool(self.offset) or self.factor != 1.0


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer: tensor `<name>.weight` [out_features, in_features] and an optional `<name>.bias`.

    transposed_as: its name in the family's files where they hold the transpose of the weight (GPT-2's Conv1D).
    """

    name: str
    out_features: int
    in_features: int
    bias: bool = False
    transposed_as: str | None = None


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are scaled beyond the trained context; fields that a kind does not use stay neutral."""

    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin; yarn: 0.1 ln(factor) + 1 unless the config gives one
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # longrope: divisor of each frequency up to `original_context` ...
    long_factors: tuple[float, ...] = ()  # ... and beyond
    partial_factor: float = 1.0  # proportional: the share of frequencies that rotate, from the first
    query_beta: float = 0.0  # queries *= 1 + query_beta ln(1 + floor((position + query_offset) / original_context))
    query_offset: int = 0


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first `dim` values of each head: pairs (i, i + dim / 2), `interleaved`: (2i, 2i + 1).

    With `dim` 0 nothing rotates, and only queries are scaled by position (Llama 4).
    """

    theta: float
    dim: int
    scaling: RopeScaling
    interleaved: bool = False
    clockwise: bool = False  # rotate by the negative angle (nanochat)


@dataclass(frozen=True)
class PositionSpec:
    """Tables of which rows are added to the embedding of a token: `first` + position of `table`, type of `types`.

    Decoders have `table` alone. Tokens have type 0, except in pairs of texts. Encoders with rotary embedding have no
    table, and MPNet has no types.
    `distances`: a row for each range of distances between tokens, whose values are added to the scores of the heads in
    all layers.
    """

    table: LinearSpec | None
    types: LinearSpec | None
    first: int = 0
    distances: LinearSpec | None = None


@dataclass(frozen=True)
class ClassifierSpec:
    """A head with one output for a text or a pair: out(norm(activation(dense(x)))).

    x is the final state of the first token, or the mean of all.
    """

    dense: LinearSpec
    out: LinearSpec
    activation: Literal["tanh", "gelu"] = "tanh"
    norm: NormSpec | None = None
    mean: bool = False


@dataclass(frozen=True)
class OutputRows:
    """The output rows of `product` that each determine one input of a later product.

    Input [group, copy, position] of the later product comes from row `start` + group * stride + position, for every
    copy (query heads that share a key-value head are copies). AWQ uses this: a factor on an input is undone in those
    rows.
    """

    product: str
    start: int
    groups: int
    copies: int
    width: int
    stride: int = 0  # 0: width


# What produces each input of a product by a single operation; None: nothing does.
InputSource = NormSpec | OutputRows | None


class PartSpec(Protocol):
    """A part of a layer: x + residual_scale * output_norm(f(norm(x))), where f consists of products.

    The norms are None where the family has none.
    """

    @property
    def norm(self) -> NormSpec | None: ...

    @property
    def output_norm(self) -> NormSpec | None: ...

    @property
    def residual_scale(self) -> float: ...

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        """Return the linears of each product by its name, in execution order; linears of one product share an input."""
        ...

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        """Return the norms besides `norm` and `output_norm`."""
        ...

    def input_source(self, product: str) -> InputSource:
        """Return what produces the inputs of one of the products."""
        ...


@dataclass(frozen=True)
class GateSpec:
    """A gate of attention: activation(linear(x)) multiplies the outputs of the heads, x being the input of q, k and v.

    The linear has a row for each head or for each value of a head.
    """

    linear: LinearSpec
    activation: Literal["sigmoid", "softplus"] = "sigmoid"


@dataclass(frozen=True)
class DifferentialSpec:
    """Differential attention (arXiv 2410.05258): each head is a pair, softmax(q1 k1) v - L softmax(q2 k2) v.

    L = exp(sum(q_1 * k_1)) - exp(sum(q_2 * k_2)) + `initial`; `lambdas`: the tensors q_1, k_1, q_2, k_2 [head_dim / 2].
    Pair p of the keys is heads p and p + kv_heads of the projection, and its value is theirs, side by side.
    """

    lambdas: tuple[str, str, str, str]
    initial: float


KEY_BIAS_WIDTH = 16  # one value and zeros: attention kernels multiply vectors of 16


@dataclass(frozen=True)
class KeyBiasSpec:
    """A bias of each key in all its scores (Doge): exp(rate * softplus(linear(v))), v being the values of all heads.

    `linear` has a row for each key-value head; `rate` is a tensor [kv_heads].
    """

    linear: LinearSpec
    rate: str


@dataclass(frozen=True)
class AttentionSpec:
    """Attention: q, k, v in one product, head norms, rotary embedding, attention, o.

    kv_heads and head_dim are those of the cache: a pair of heads counts as one with `differential`, and `key_bias` adds
    `KEY_BIAS_WIDTH` values, so that the kernels of plain attention compute both.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None  # number of tokens that a query sees, itself included; None for all
    norm: NormSpec | None
    # One linear for all or one each. No v where values are the keys before norm and rotation; q alone with `kv_source`.
    qkv: tuple[LinearSpec, ...]
    q_norm: NormSpec | None  # head norms: over each head, or over all heads if that is their size
    k_norm: NormSpec | None
    o: LinearSpec
    output_norm: NormSpec | None = None
    v_norm: NormSpec | None = None
    rope: RopeSpec | None = None
    norm_after_rope: bool = False  # q_norm and k_norm follow the rotation
    scale: float | None = None  # multiplies the scores; None for 1 / sqrt(head_dim)
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    clip: float | None = None  # q, k and v are clamped to [-clip, clip] before the rotation
    kv_source: int | None = None  # the layer whose cached keys and values this one reads
    kv_shared: bool = False  # a later layer reads the keys and values of this one
    sinks: str | None = None  # tensor [heads]: an extra score per head in the softmax, without a value
    gated: bool = False  # each query head is followed by head_dim gates; their sigmoid multiplies its output
    gate: GateSpec | None = None
    chunk: int | None = None  # a query sees the keys from the last multiple of `chunk` on, as far as `window` allows
    value_dim: int | None = None  # size of a value where it is below head_dim; cached values are padded with zeros
    value_scale: float = 1.0
    inner_norm: NormSpec | None = None  # before `o`: of the outputs of all heads, or of each head if that is its size
    differential: DifferentialSpec | None = None
    key_bias: KeyBiasSpec | None = None
    residual_scale: float = 1.0
    normed_residual: bool = False  # the sum is with the output of `norm`, not its input (BERT's norms after sums)

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def projected_dim(self) -> int:
        """Size of a head as the first product computes it."""
        if self.differential is not None:
            return self.head_dim // 2
        return self.head_dim - (0 if self.key_bias is None else KEY_BIAS_WIDTH)

    @property
    def query_heads(self) -> int:
        """Number of heads that the first product computes for queries and their gates."""
        return 2 * self.heads if self.gated else self.heads

    @property
    def projected_heads(self) -> int:
        """Number of heads that the first product computes: queries, gates, and keys and values where it has them."""
        return sum(linear.out_features for linear in self.qkv) // self.projected_dim

    @property
    def has_v_proj(self) -> bool:
        if self.value_dim is not None or self.differential is not None:
            return True
        return self.projected_heads == self.query_heads + 2 * self.kv_heads

    @property
    def head_gate(self) -> GateSpec | None:
        """The gate if it has one value for each head: a small linear that stays dense."""
        return self.gate if self.gate is not None and self.gate.linear.out_features == self.heads else None

    @property
    def value_gate(self) -> GateSpec | None:
        """The gate if it has one value for each value of a head: a linear of the first product, after v."""
        return None if self.head_gate is not None else self.gate

    @property
    def unquantized(self) -> tuple[LinearSpec, ...]:
        gate = () if self.head_gate is None else (self.head_gate.linear,)
        return gate if self.key_bias is None else (*gate, self.key_bias.linear)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of each tensor that is neither a norm nor a linear."""
        if self.sinks is not None:
            yield self.sinks, (self.heads,)
        if self.differential is not None:
            yield from ((name, (self.projected_dim,)) for name in self.differential.lambdas)
        if self.key_bias is not None:
            yield self.key_bias.rate, (self.kv_heads,)

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        gate = () if self.value_gate is None else (self.value_gate.linear,)
        return {"qkv": (*self.qkv, *gate), "o": (self.o,)}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        return self.q_norm, self.k_norm, self.v_norm, self.inner_norm

    def input_source(self, product: str) -> InputSource:
        if product == "qkv":
            return None if self.head_gate is not None else self.norm  # the norm feeds the gate too
        if self.inner_norm is not None:
            return self.inner_norm
        # A norm of values would undo a factor, and rows that are keys as well as values cannot take one.
        # Values that also determine the biases of keys cannot either.
        if self.v_norm is not None or self.key_bias is not None or not self.has_v_proj:
            return None
        start, copies = (self.query_heads + self.kv_heads) * self.head_dim, self.heads // self.kv_heads
        return OutputRows("qkv", start, self.kv_heads, copies, self.value_dim or self.head_dim)


@dataclass(frozen=True)
class MlpSpec:
    """An MLP: down(activation(gate(x)) * up(x)), or down(activation(up(x))) where there is no gate.

    gate_scale: multiplies gate(x). sparsity: the share of gates that a threshold sets to zero, if those of a token are
    normally distributed: gate(x) becomes relu(gate(x) - mean - quantile * deviation), both over the token's gates.
    parameters: names and shapes of the activation's tensors; those of xielu are alpha_p, alpha_n, beta and eps.
    """

    size: int
    norm: NormSpec | None
    gate_up: tuple[LinearSpec, ...]
    down: LinearSpec
    output_norm: NormSpec | None = None
    activation: ActivationName = "silu"
    residual_scale: float = 1.0
    parameters: tuple[tuple[str, Shape], ...] = ()
    inner_norm: NormSpec | None = None  # of the input of `down`
    gate_scale: float = 1.0
    sparsity: float = 0.0
    normed_residual: bool = False  # as in `AttentionSpec`

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        return (*self.gate_up, self.down)

    @property
    def gated(self) -> bool:
        return sum(linear.out_features for linear in self.gate_up) > self.size

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        return {"gate_up": self.gate_up, "down": (self.down,)}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        return (self.inner_norm,)

    def input_source(self, product: str) -> InputSource:
        if product == "gate_up":
            return self.norm
        if self.inner_norm is not None:
            return self.inner_norm
        # The input of down is linear in a row of up only with a gate; those of gpt-oss clamp up too.
        linear_in_up = self.gated and self.activation not in ("swiglu_clamped", "swiglu_halves")
        return OutputRows("gate_up", self.size, 1, 1, self.size) if linear_in_up else None
