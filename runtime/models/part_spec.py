"""What a layer is made of, as a checkpoint names it: norms, linears, rotations, attention, an MLP.

Knows names and shapes of tensors. Does not know what stands in a layer, or what follows what. Does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Shape = tuple[int, ...]
# Of a gate, times what goes up beside it. relu2 has no gate; swiglu_clamped, of gpt-oss, has gate and up in turn.
ActivationName = Literal["silu", "gelu_tanh", "relu2", "swiglu_clamped"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True)
class NormSpec:
    """One norm as the checkpoint names it: an RMSNorm whose gain is `offset` plus the tensor [size] of that name, times
    `factor`.

    `name` None: no tensor, and a gain of one. `bare`: the tensor is named as the norm is, not `<name>.weight`.
    `centred`: the mean is taken away first, a LayerNorm without a bias.
    """

    name: str | None
    size: int
    eps: float
    offset: float = 0.0
    layer_norm: bool = False
    factor: float = 1.0
    bare: bool = False

    @property
    def tensor(self) -> str:
        """The name of its tensor. Only for norms that have one."""
        assert self.name is not None
        return self.name if self.bare else f"{self.name}.weight"

    @property
    def fp32_gain(self) -> bool:
        """Whether the gain is not what is stored: it is then kept in fp32."""
        return bool(self.offset) or self.factor != 1.0


@dataclass(frozen=True)
class LinearSpec:
    """One linear layer as the checkpoint names it: weight [out_features, in_features] and an optional bias."""

    name: str
    out_features: int
    in_features: int
    bias: bool = False


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the trained context. Unused fields keep their neutral value.

    `attention_factor` multiplies cos and sin (yarn: 0.1 ln(factor) + 1 unless the config says otherwise). `short` and
    `long`, of longrope, divide the frequencies, one number for each: in contexts of up to `original_context` tokens,
    and in longer ones. `share`: of the frequencies, the first that turn (proportional). Queries are multiplied by
    1 + `query_beta` ln(1 + floor(position / original_context)).
    """

    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    partial_factor: float = 1.0
    query_beta: float = 0.0


@dataclass(frozen=True)
class RopeSpec:
    """A rotation of the first `dim` values of each head by position.

    Pairs are (i, i + dim / 2), or `interleaved` (2i, 2i + 1).
    """

    theta: float
    dim: int
    scaling: RopeScaling
    interleaved: bool = False


@dataclass(frozen=True)
class OutputRows:
    """The rows of a product's output that make, each alone, the inputs of a later product.

    Its inputs, seen as [groups, copies, width], are made by rows `start` + group * width + position, whichever the
    copy: query heads that share a key-value head are copies. So a factor on an input can be taken back in those rows.
    """

    product: str
    start: int
    groups: int
    copies: int
    width: int


InputSource = NormSpec | OutputRows | None  # what makes the inputs of a product one by one, if a single operation does


class PartSpec(Protocol):
    """What a layer does to the residual stream in one go: a norm, some products, a norm, the sum.

    `norm` and `output_norm` are None where the family has none there. What is added is first multiplied by `residual`.
    """

    @property
    def norm(self) -> NormSpec | None: ...  # noqa: D102  # a field of the parts below

    @property
    def output_norm(self) -> NormSpec | None: ...  # noqa: D102

    @property
    def residual_scale(self) -> float: ...  # noqa: D102

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        """Its linears by the product they are part of, in order of execution."""
        ...

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        """Its other norms."""
        ...

    def input_source(self, product: str) -> InputSource:
        """What makes the inputs of one of its products."""
        ...


@dataclass(frozen=True)
class AttentionSpec:
    """Attention: q, k, v side by side, norms of heads, rotation, attention, o.

    `q_norm`, `k_norm`, `v_norm` are over each head, or over all heads at once where their size is that of all heads;
    those of queries and keys come before the rotation, or after it (`norms_rotated`). `window` in tokens: a query sees
    itself and window - 1 before it, None for all. `scale` multiplies the products of queries and keys, None for
    1 / sqrt(head_dim); a `softcap` c then makes them c tanh(. / c). Before the rotation queries, keys and values are
    brought within -`clip` and `clip`.

    `qkv` holds no values where they are the keys before norm and rotation, and only queries where the layer reads what
    an earlier layer, `shares`, has put into the cache; `lends`: a later layer reads this one's. `sinks` names a tensor
    [heads]: scores that take part in each head's softmax and have no value. Where it is `gated`, each query is followed
    by as many values, whose sigmoid multiplies what the head attended to.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    norm: NormSpec | None
    qkv: tuple[LinearSpec, ...]
    q_norm: NormSpec | None
    k_norm: NormSpec | None
    o: LinearSpec
    output_norm: NormSpec | None = None
    v_norm: NormSpec | None = None
    rope: RopeSpec | None = None
    norm_after_rope: bool = False
    scale: float | None = None
    softcap: float | None = None
    clip: float | None = None
    kv_source: int | None = None
    kv_shared: bool = False
    sinks: str | None = None
    gated: bool = False
    residual_scale: float = 1.0

    @property
    def query_heads(self) -> int:
        """How many heads the first product makes for queries, and for their gates."""
        return 2 * self.heads if self.gated else self.heads

    @property
    def projected_heads(self) -> int:
        """How many heads the first product makes: queries, then keys and values where it makes them."""
        return sum(linear.out_features for linear in self.qkv) // self.head_dim

    @property
    def has_v_proj(self) -> bool:
        """Whether the values have rows of their own in the first product."""
        return self.projected_heads == self.query_heads + 2 * self.kv_heads

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        """As `PartSpec.products`."""
        return {"qkv": self.qkv, "o": (self.o,)}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        """As `PartSpec.inner_norms`."""
        return self.q_norm, self.k_norm, self.v_norm

    def input_source(self, product: str) -> InputSource:
        # A norm of values undoes a factor; rows shared by keys and values cannot take one.
        if product == "qkv":
            return self.norm
        if self.v_norm is not None or not self.has_v_proj:
            return None
        start, copies = (self.query_heads + self.kv_heads) * self.head_dim, self.heads // self.kv_heads
        return OutputRows("qkv", start, self.kv_heads, copies, self.head_dim)


@dataclass(frozen=True)
class MlpSpec:
    """An MLP: gate and up side by side, activation(gate) * up, down; or, without a gate, up, activation(up), down."""

    size: int
    norm: NormSpec | None
    gate_up: tuple[LinearSpec, ...]
    down: LinearSpec
    output_norm: NormSpec | None = None
    activation: ActivationName = "silu"
    residual_scale: float = 1.0

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """All of its linears."""
        return (*self.gate_up, self.down)

    @property
    def gated(self) -> bool:
        """Whether there is a gate."""
        return self.activation != "relu2"

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        """As `PartSpec.products`."""
        return {"gate_up": self.gate_up, "down": (self.down,)}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        """As `PartSpec.inner_norms`."""
        return ()

    def input_source(self, product: str) -> InputSource:
        # Without a gate, an activation is between a row of up and the input of down.
        if product == "gate_up":
            return self.norm
        plain = self.gated and self.activation != "swiglu_clamped"
        return OutputRows("gate_up", self.size, 1, 1, self.size) if plain else None
