"""Declarations of recurrent token mixers: Gated DeltaNet, Kimi Delta Attention, Mamba-1 and -2, short convolutions.

Names and shapes of tensors and of the states that replace keys and values. Without torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mycli.runtime.models.part_spec import InputSource, LinearSpec, NormSpec, OutputRows, Shape

STATE_BYTES = 4  # states are fp32: they are summed over the whole sequence, where bf16 would lose the updates


@dataclass(frozen=True)
class ConvolutionSpec:
    """A causal depthwise convolution: weight [channels, 1, taps], the last tap for the current token.

    parts: names and channels of tensors that hold the weight side by side, where it is not one.
    """

    name: str
    channels: int
    taps: int
    bias: bool = False
    parts: tuple[tuple[str, int], ...] = ()

    def weights(self) -> Iterator[tuple[str, Shape]]:
        for name, channels in self.parts or ((self.name, self.channels),):
            yield f"{name}.weight", (channels, 1, self.taps)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        yield from self.weights()
        if self.bias:
            yield f"{self.name}.bias", (self.channels,)

    @property
    def state_shape(self) -> Shape:
        """Shape of the state: the last taps - 1 inputs, oldest first."""
        return self.taps - 1, self.channels


@dataclass(frozen=True)
class DeltaNetSpec:
    """Gated DeltaNet: a linear attention layer with the state S [key_dim, value_dim] per head.

    With q and k of length one, q divided by sqrt(key_dim), beta = beta_scale * sigmoid(b) and g = -exp(A) softplus(a +
    dt): S <- exp(g) S + k (beta (v - exp(g) S^T k))^T, output S^T q. Each of `heads` reads the query and key of group
    head // (heads / key_heads). Outputs pass `head_norm` and are multiplied by SiLU(z) before `out`.

    projections: q, k, v, which pass the convolution and SiLU, and z. gates: b and a, one value per head.
    decay, dt_bias: names of the tensors A and dt [heads].
    by_key_head: projections and gates are ordered by key head: its q, its k, then v and z of its heads.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    norm: NormSpec | None
    projections: tuple[LinearSpec, ...]
    gates: tuple[LinearSpec, ...]
    convolution: ConvolutionSpec
    decay: str
    dt_bias: str
    head_norm: NormSpec
    out: LinearSpec
    by_key_head: bool = False
    beta_scale: float = 1.0  # 2 allows negative eigenvalues of the state's transition (OLMo Hybrid)
    output_norm: NormSpec | None = None
    residual_scale: float = 1.0

    @property
    def unquantized(self) -> tuple[LinearSpec, ...]:
        # Small, and their outputs are exponents of the decay: an error is multiplied over the sequence.
        return self.gates

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        return {"recurrent_in": self.projections, "recurrent_out": (self.out,)}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        return (self.head_norm,)

    def input_source(self, product: str) -> InputSource:
        # The norm feeds the gates too; the norm of heads undoes a factor.
        return None

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of each tensor that is neither a norm nor a linear of a product."""
        yield from self.convolution.tensors()
        yield self.decay, (self.heads,)
        yield self.dt_bias, (self.heads,)

    def state_shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of the states of one sequence."""
        return self.convolution.state_shape, (self.heads, self.key_dim, self.value_dim)

    def forward_values(self) -> int:
        """Return the number of activation values per token of a forward pass, for the memory model."""
        # Projections (twice if reordered), convolved, queries and keys in fp32, read from the state, gated, projected.
        projected = sum(linear.out_features for linear in (*self.projections, *self.gates)) * (1 + self.by_key_head)
        exact = 2 * 2 * self.key_heads * self.key_dim
        return projected + self.convolution.channels + exact + 2 * self.out.in_features + self.out.out_features

    def draft_values(self) -> int:
        """Return the number of values per drafted token that are held until it is accepted, for the memory model."""
        return sum(linear.out_features for linear in (*self.projections, *self.gates))

    def training_values(self) -> int:
        """Return the number of values per token of a forward and backward pass."""
        # Forward values and their gradients, the convolution's products, and per head a share of six [64, 64] matrices
        # of a chunk and six copies of q, k and v.
        chunk = 6 * self.heads * (64 + 2 * self.key_dim + self.value_dim)
        return 2 * self.forward_values() + 2 * self.convolution.taps * self.convolution.channels + chunk


@dataclass(frozen=True)
class KimiDeltaSpec:
    """Kimi Delta Attention (arXiv 2510.26692): Gated DeltaNet in which each key channel of a head has its own decay.

    With g = -exp(A) softplus(a + dt) by channel, or `floor` * sigmoid(exp(A) (a + dt)) where floor is not 0, and
    D = diag(exp(g)): S <- D S + k (beta (v - S^T D k))^T. Outputs pass `head_norm` and are multiplied by sigmoid(z).

    projections: q, k, v, then z and a where these are whole. gates: b, then the low ranks of a and of z where they are
    not, which `decay_b` and `gate_b` multiply. decay: name and shape of A; dt_bias: name of dt [heads * head_dim].
    """

    heads: int
    head_dim: int
    norm: NormSpec | None
    projections: tuple[LinearSpec, ...]
    gates: tuple[LinearSpec, ...]
    convolution: ConvolutionSpec
    decay: tuple[str, Shape]
    dt_bias: str
    head_norm: NormSpec
    out: LinearSpec
    decay_b: LinearSpec | None = None
    gate_b: LinearSpec | None = None
    floor: float = 0.0
    output_norm: NormSpec | None = None
    residual_scale: float = 1.0

    @property
    def width(self) -> int:
        """Number of values of all queries, and of all keys, values, decays and gates."""
        return self.heads * self.head_dim

    @property
    def unquantized(self) -> tuple[LinearSpec, ...]:
        # As for `DeltaNetSpec`; the projections of low rank are small too.
        return (*self.gates, *(linear for linear in (self.decay_b, self.gate_b) if linear is not None))

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        return {"recurrent_in": self.projections, "recurrent_out": (self.out,)}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        return (self.head_norm,)

    def input_source(self, product: str) -> InputSource:
        return None  # as for `DeltaNetSpec`

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of each tensor that is neither a norm nor a linear of a product."""
        yield from self.convolution.tensors()
        yield self.decay
        yield self.dt_bias, (self.width,)

    def state_shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of the states of one sequence."""
        return self.convolution.state_shape, (self.heads, self.head_dim, self.head_dim)

    def forward_values(self) -> int:
        """Return the number of activation values per token of a forward pass, for the memory model."""
        # Projected, convolved, queries, keys and decays in fp32, read from the state, gated, projected.
        linears = (*self.projections, *self.unquantized)
        projected = sum(linear.out_features for linear in linears) + self.heads + self.width
        return projected + self.convolution.channels + 2 * 3 * self.width + 2 * self.width + self.out.out_features

    def draft_values(self) -> int:
        """As for `DeltaNetSpec`."""
        return sum(linear.out_features for linear in self.projections) + self.heads + self.width

    def training_values(self) -> int:
        """Return the number of values per token of a forward and backward pass."""
        # As for `DeltaNetSpec`, with a decay of each channel for the pairs of tokens of a chunk of 16, four times.
        chunk = 6 * self.heads * (16 + 3 * self.head_dim) + 4 * 16 * self.width
        return 2 * self.forward_values() + 2 * self.convolution.taps * self.convolution.channels + chunk


@dataclass(frozen=True)
class ShortConvSpec:
    """A gated short convolution: B, C, x = projection(input); out(C * convolution(B * x))."""

    norm: NormSpec | None
    projection: LinearSpec
    convolution: ConvolutionSpec
    out: LinearSpec
    output_norm: NormSpec | None = None
    residual_scale: float = 1.0

    @property
    def unquantized(self) -> tuple[LinearSpec, ...]:
        return ()

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        return {"recurrent_in": (self.projection,), "recurrent_out": (self.out,)}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        return ()

    def input_source(self, product: str) -> InputSource:
        if product == "recurrent_in":
            return self.norm
        size = self.convolution.channels  # rows of C, the second of the three, multiply the input of `out`
        return OutputRows("recurrent_in", size, 1, 1, size)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        return self.convolution.tensors()

    def state_shapes(self) -> tuple[Shape, ...]:
        return (self.convolution.state_shape,)

    def forward_values(self) -> int:
        return 6 * self.convolution.channels + self.out.out_features  # B, C, x, B * x, convolved, gated

    def draft_values(self) -> int:
        return self.convolution.channels

    def training_values(self) -> int:
        return 2 * self.forward_values() + 2 * self.convolution.taps * self.convolution.channels


@dataclass(frozen=True)
class MambaSpec:
    """Mamba-2 (arXiv 2405.21060): a state space layer with the state S [state_dim, head_dim] per head.

    With t = softplus(dt + dt_bias) clamped to `step_limits`: S <- exp(-exp(A) t) S + B (t x)^T, output S^T C + D x.
    Each of `heads` reads B and C of group head // (heads / groups). Outputs are multiplied by SiLU(z), normed in
    `norm_groups` parts by `gated_norm` if there is one, before the multiplication with `norm_first`, and passed to
    `out`.

    projection: z, then x, B and C, which pass the convolution and SiLU, then dt, one value per head.
    decay, dt_bias, skip: names of the tensors A, dt_bias and D [heads].
    multipliers: of z, x, B, C and dt as they are projected; empty for none.
    """

    heads: int
    groups: int
    head_dim: int
    state_dim: int
    norm: NormSpec | None
    projection: LinearSpec
    convolution: ConvolutionSpec
    decay: str
    dt_bias: str
    skip: str
    gated_norm: NormSpec | None
    norm_groups: int
    out: LinearSpec
    norm_first: bool = False
    multipliers: tuple[float, ...] = ()
    step_limits: tuple[float, float] = (0.0, float("inf"))
    output_norm: NormSpec | None = None
    residual_scale: float = 1.0

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def unquantized(self) -> tuple[LinearSpec, ...]:
        return ()

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        return {"recurrent_in": (self.projection,), "recurrent_out": (self.out,)}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        return (self.gated_norm,)

    def input_source(self, product: str) -> InputSource:
        if product == "recurrent_in":
            return self.norm
        # A gate after the norm multiplies value by value: a factor passes through it.
        return self.gated_norm

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of each tensor that is neither a norm nor a linear of a product."""
        yield from self.convolution.tensors()
        for name in (self.decay, self.dt_bias, self.skip):
            yield name, (self.heads,)

    def state_shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of the states of one sequence."""
        # The head's dimensions last, unlike transformers' states: no product sums within a vector register.
        return self.convolution.state_shape, (self.heads, self.state_dim, self.head_dim)

    def forward_values(self) -> int:
        """Return the number of activation values per token of a forward pass, for the memory model."""
        # Projected, convolved, B, C and steps in fp32, read from the state, gated, projected.
        exact = 2 * (2 * self.groups * self.state_dim + 2 * self.heads)
        return self.projection.out_features + self.convolution.channels + exact + 2 * self.inner + self.out.out_features

    def draft_values(self) -> int:
        return self.projection.out_features

    def training_values(self) -> int:
        """Return the number of values per token of a forward and backward pass."""
        # As for `DeltaNetSpec`, with four matrices of a chunk and copies of B and C for each head.
        chunk = 4 * self.heads * (64 + 2 * self.state_dim + self.head_dim)
        return 2 * self.forward_values() + 2 * self.convolution.taps * self.convolution.channels + chunk


@dataclass(frozen=True)
class SelectiveSpec:
    """Mamba-1 (arXiv 2312.00752): a state space layer with a state [state_dim] and a step per channel.

    With dt, B and C = `select`(x), each normalized where there are `select_norms`, and t = softplus(`step`(dt) +
    dt_bias): S <- exp(-exp(A) t) S + B (t x), output S^T C + D x. Outputs are multiplied by SiLU(z) before `out`.

    projection: x, which passes the convolution and SiLU, then z.
    decay, dt_bias, skip: names of the tensors A [channels, state_dim], dt_bias and D [channels].
    """

    state_dim: int
    norm: NormSpec | None
    projection: LinearSpec
    convolution: ConvolutionSpec
    select: LinearSpec
    select_norms: tuple[NormSpec, ...]
    step: LinearSpec
    decay: str
    dt_bias: str
    skip: str
    out: LinearSpec
    output_norm: NormSpec | None = None
    residual_scale: float = 1.0

    @property
    def channels(self) -> int:
        return self.convolution.channels

    @property
    def unquantized(self) -> tuple[LinearSpec, ...]:
        # 4 % of a layer's weights in Falcon-Mamba 7B; their outputs are exponents of the decay, as for `DeltaNetSpec`.
        return self.select, self.step

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        return {"recurrent_in": (self.projection,), "recurrent_out": (self.out,)}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        return self.select_norms

    def input_source(self, product: str) -> InputSource:
        return self.norm if product == "recurrent_in" else None  # the scan is not linear in any rows of a product

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of each tensor that is neither a norm nor a linear of a product."""
        yield from self.convolution.tensors()
        yield self.decay, (self.channels, self.state_dim)
        for name in (self.dt_bias, self.skip):
            yield name, (self.channels,)

    def state_shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of the states of one sequence."""
        # Channels last, as a head's dimensions in `MambaSpec`: to the scan this is one head with a step per column.
        return self.convolution.state_shape, (1, self.state_dim, self.channels)

    def forward_values(self) -> int:
        """Return the number of activation values per token of a forward pass, for the memory model."""
        # Projected, convolved, dt with B and C twice (normed), steps twice (in fp32), scanned, gated, projected.
        small = 2 * self.select.out_features
        return self.projection.out_features + small + 7 * self.channels + self.out.out_features

    def draft_values(self) -> int:
        return self.projection.out_features

    def training_values(self) -> int:
        """Return the number of values per token of a forward and backward pass."""
        # As for `DeltaNetSpec`; the scan holds four fp32 values of a state for each token.
        states = 2 * 4 * self.state_dim * self.channels
        return 2 * self.forward_values() + 2 * self.convolution.taps * self.channels + states


RecurrentSpec = DeltaNetSpec | KimiDeltaSpec | MambaSpec | SelectiveSpec | ShortConvSpec
