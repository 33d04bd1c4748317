"""What one decoder layer is: its norms, linears, attention and MLP, declared once for everyone who has to know.

Running a layer, calibrating it, rescaling it, tuning it, counting its memory and fusing its kernels all read the same
declaration. A layer is a sequence of parts on the residual stream, each of which names its norms, its products, and
what makes their inputs. Knows names and shapes of tensors. Does not import torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from mycli.runtime.models.config import RopeScaling
    from mycli.runtime.models.recurrent_spec import RecurrentSpec

Shape = tuple[int, ...]
# Of a gate, times what goes up beside it. relu2 has no gate; swiglu_clamped, of gpt-oss, has gate and up in turn.
ActivationName = Literal["silu", "gelu_tanh", "relu2", "swiglu_clamped"]


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
    centred: bool = False
    factor: float = 1.0
    bare: bool = False

    @property
    def tensor(self) -> str:
        """The name of its tensor. Only for norms that have one."""
        assert self.name is not None
        return self.name if self.bare else f"{self.name}.weight"

    @property
    def exact(self) -> bool:
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
class RopeSpec:
    """A rotation of the first `dim` values of each head by position.

    Pairs are (i, i + dim / 2), or `interleaved` (2i, 2i + 1).
    """

    theta: float
    dim: int
    scaling: "RopeScaling"
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


MadeBy = NormSpec | OutputRows | None  # what makes the inputs of a product one by one, if a single operation does


class PartSpec(Protocol):
    """What a layer does to the residual stream in one go: a norm, some products, a norm, the sum.

    `norm` and `output_norm` are None where the family has none there. What is added is first multiplied by `residual`.
    """

    @property
    def norm(self) -> NormSpec | None: ...  # noqa: D102  # a field of the parts below

    @property
    def output_norm(self) -> NormSpec | None: ...  # noqa: D102

    @property
    def residual(self) -> float: ...  # noqa: D102

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        """Its linears by the product they are part of, in order of execution."""
        ...

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        """Its other norms."""
        ...

    def made_by(self, product: str) -> MadeBy:
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
    norms_rotated: bool = False
    scale: float | None = None
    softcap: float | None = None
    clip: float | None = None
    shares: int | None = None
    lends: bool = False
    sinks: str | None = None
    gated: bool = False
    residual: float = 1.0

    @property
    def queries(self) -> int:
        """How many heads the first product makes for queries, and for their gates."""
        return 2 * self.heads if self.gated else self.heads

    @property
    def projected(self) -> int:
        """How many heads the first product makes: queries, then keys and values where it makes them."""
        return sum(linear.out_features for linear in self.qkv) // self.head_dim

    @property
    def makes_values(self) -> bool:
        """Whether the values have rows of their own in the first product."""
        return self.projected == self.queries + 2 * self.kv_heads

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        """As `PartSpec.products`."""
        return {"qkv": self.qkv, "o": (self.o,)}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        """As `PartSpec.inner_norms`."""
        return self.q_norm, self.k_norm, self.v_norm

    def made_by(self, product: str) -> MadeBy:
        """As `PartSpec.made_by`. A norm of values undoes a factor, and what keys share with values cannot take one."""
        if product == "qkv":
            return self.norm
        if self.v_norm is not None or not self.makes_values:
            return None
        start, copies = (self.queries + self.kv_heads) * self.head_dim, self.heads // self.kv_heads
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
    residual: float = 1.0

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

    def made_by(self, product: str) -> MadeBy:
        """As `PartSpec.made_by`. Without a gate, an activation stands between a row of up and the input it makes."""
        if product == "gate_up":
            return self.norm
        plain = self.gated and self.activation != "swiglu_clamped"
        return OutputRows("gate_up", self.size, 1, 1, self.size) if plain else None


@dataclass(frozen=True)
class StackSpec:
    """A tensor [experts, rows, ...] of a file that holds `parts`, equally many rows each, in their order."""

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class SharedExpertSpec:
    """An MLP that every token goes through beside its chosen experts, times sigmoid(gate) where there is a gate [1,
    hidden]."""

    mlp: MlpSpec
    gate: LinearSpec | None = None


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts (arXiv 1701.06538): MLPs alike in shape, of which each token goes through `top_k`.

    The `router` scores the experts for a token; the highest `top_k` are chosen, and what they make is summed with
    weights from a softmax over all scores, or, where `normalized`, over those of the chosen. Router and gate decide,
    and are never stored quantized. `stacks`: tensors that hold those of all experts.

    All read what `norm` makes, unless there is none: then the router, the experts and the shared one read the stream
    through norms of their own, `router_norm`, `expert_norm` and the shared MLP's; `expert_output_norm` is of what the
    experts make together. `scales` names a tensor [experts]: factors of the weights.
    """

    norm: NormSpec | None
    router: LinearSpec
    experts: tuple[MlpSpec, ...]
    top_k: int
    normalized: bool
    stacks: tuple[StackSpec, ...] = ()
    shared: SharedExpertSpec | None = None
    output_norm: NormSpec | None = None
    residual: float = 1.0
    router_norm: NormSpec | None = None
    expert_norm: NormSpec | None = None
    expert_output_norm: NormSpec | None = None
    scales: str | None = None

    @property
    def size(self) -> int:
        """Inner width of one expert."""
        return self.experts[0].size

    @property
    def activation(self) -> ActivationName:
        """Of every expert."""
        return self.experts[0].activation

    @property
    def idle(self) -> int:
        """How many experts a token does not go through."""
        return len(self.experts) - self.top_k

    @property
    def expert_parameters(self) -> int:
        """Of one expert: weights and biases."""
        return sum(linear.out_features * (linear.in_features + linear.bias) for linear in self.experts[0].linears)

    @property
    def kept(self) -> tuple[LinearSpec, ...]:
        """The linears that are never stored quantized."""
        gate = None if self.shared is None else self.shared.gate
        return (self.router,) if gate is None else (self.router, gate)

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        """As `PartSpec.products`: those of the shared expert, then `experts.<index>.gate_up` and `.down` of each."""
        mlps = {} if self.shared is None else {"shared": self.shared.mlp}
        mlps |= {f"experts.{index}": expert for index, expert in enumerate(self.experts)}
        return {f"{name}.{own}": linears for name, mlp in mlps.items() for own, linears in mlp.products().items()}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        """As `PartSpec.inner_norms`."""
        beside = () if self.shared is None else (self.shared.mlp.norm, self.shared.mlp.output_norm)
        return (self.router_norm, self.expert_norm, self.expert_output_norm, *beside)

    def made_by(self, product: str) -> MadeBy:
        """As `PartSpec.made_by`. What a norm makes for all experts goes to each alike, maybe to the router too; a
        shared expert may have one for itself."""
        owner, _, own = product.rpartition(".")
        mlp = self.experts[int(owner.removeprefix("experts."))] if owner.startswith("experts.") else self._shared()
        source = mlp.made_by(own)
        return replace(source, product=f"{owner}.{source.product}") if isinstance(source, OutputRows) else source

    def _shared(self) -> MlpSpec:
        assert self.shared is not None
        return self.shared.mlp


@dataclass(frozen=True)
class PerLayerSpec:
    """What a layer is told of each token itself [..., width]: gate, activation(gate) * told, projection."""

    gate: LinearSpec
    projection: LinearSpec
    output_norm: NormSpec | None
    activation: ActivationName
    norm: NormSpec | None = None
    residual: float = 1.0

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        """As `PartSpec.products`."""
        return {"per_layer_gate": (self.gate,), "per_layer_projection": (self.projection,)}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        """As `PartSpec.inner_norms`."""
        return ()

    def made_by(self, product: str) -> MadeBy:
        """As `PartSpec.made_by`. The gate reads the residual stream, the projection an activation."""
        return self.norm if product == "per_layer_gate" else None


@dataclass(frozen=True)
class LayerSpec:
    """One layer: `mixer`, which lets tokens know of each other, and an MLP.

    A product is what is multiplied at once: linears that share their input.

    `parallel`: attention and MLP both read the output of attention's norm, and both are added to what entered the
    layer; else each reads what the part before it left. `per_layer`: the part for what the layer is told of its tokens,
    if it is told. `scalar` names a tensor [1] that the stream is multiplied by at last. `unread`: how the names of
    tensors begin that files may hold though nothing reads them.
    """

    index: int
    mixer: "AttentionSpec | RecurrentSpec"
    mlp: MlpSpec | ExpertsSpec
    parallel: bool = False
    per_layer: PerLayerSpec | None = None
    scalar: str | None = None
    unread: tuple[str, ...] = ()

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a layer that attends."""
        assert isinstance(self.mixer, AttentionSpec), "asked of layers that attend only"
        return self.mixer

    @property
    def recurrent(self) -> "RecurrentSpec | None":
        """The mixer of a layer that keeps a state instead of keys and values."""
        return None if isinstance(self.mixer, AttentionSpec) else self.mixer

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        """What the layer does, in order."""
        return (self.mixer, self.mlp) if self.per_layer is None else (self.mixer, self.mlp, self.per_layer)

    @property
    def dense_mlp(self) -> MlpSpec:
        """The MLP of a layer that has no experts."""
        assert isinstance(self.mlp, MlpSpec)
        return self.mlp

    def products(self) -> dict[str, tuple[LinearSpec, ...]]:
        """The linears of each product by its name, in order of execution; outputs lie side by side in this order."""
        return {name: linears for part in self.parts for name, linears in part.products().items()}

    @property
    def kept(self) -> tuple[LinearSpec, ...]:
        """Its linears that are never stored quantized."""
        mixed = () if self.recurrent is None else self.recurrent.kept
        return (*mixed, *self.mlp.kept) if isinstance(self.mlp, ExpertsSpec) else mixed

    def norms(self) -> list[NormSpec]:
        """The norms of the layer that have a tensor."""
        streams = [norm for part in self.parts for norm in (part.norm, part.output_norm)]
        inner = [norm for part in self.parts for norm in part.inner_norms()]
        return [norm for norm in (*streams, *inner) if norm is not None and norm.name is not None]

    def made_by(self, product: str) -> MadeBy:
        """What makes the inputs of a product one by one; None where no single operation does (a residual stream), or
        where it makes those of another product too."""
        source = next(part.made_by(product) for part in self.parts if product in part.products())
        return None if self.parallel and isinstance(source, NormSpec) else source

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Names and shapes of the layer's tensors in an unquantized checkpoint."""
        for norm in self.norms():
            yield norm.tensor, (norm.size,)
        if self.recurrent is not None:
            yield from self.recurrent.tensors()
        for linears in (self.kept, *self.products().values()):
            for linear in linears:
                yield f"{linear.name}.weight", (linear.out_features, linear.in_features)
                if linear.bias:
                    yield f"{linear.name}.bias", (linear.out_features,)
        if self.recurrent is None and self.attention.sinks is not None:
            yield self.attention.sinks, (self.attention.heads,)
        if isinstance(self.mlp, ExpertsSpec) and self.mlp.scales is not None:
            yield self.mlp.scales, (len(self.mlp.experts),)
        if self.scalar is not None:
            yield self.scalar, (1,)
