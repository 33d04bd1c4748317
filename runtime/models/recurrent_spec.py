"""What stands in place of attention in layers that keep a state of fixed size instead of keys and values.

Gated DeltaNet (arXiv 2412.06464) and gated short convolutions (LFM2): their norms, linears, convolution and the shapes
of their states. Knows names and shapes of tensors. Does not import torch, and does not know what is done with a state.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mycli.runtime.models.part_spec import InputSource, LinearSpec, NormSpec, OutputRows, Shape

STATE_BYTES = 4  # of a value: states are fp32, whatever activations are


@dataclass(frozen=True)
class ConvolutionSpec:
    """A causal convolution of each channel alone: weight [channels, 1, taps], the last tap for the token itself."""

    name: str
    channels: int
    taps: int
    bias: bool = False

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Names and shapes, as checkpoints store them."""
        yield f"{self.name}.weight", (self.channels, 1, self.taps)
        if self.bias:
            yield f"{self.name}.bias", (self.channels,)

    @property
    def state_shape(self) -> Shape:
        """The inputs before the next token, the oldest first."""
        return self.taps - 1, self.channels


@dataclass(frozen=True)
class DeltaNetSpec:
    """Gated DeltaNet: what follows from the delta rule with a decay, a matrix [key_dim, value_dim] for each head.

    `projections` make queries, keys and values side by side, which `convolution` and SiLU pass, and the gates z of the
    outputs; `gates` make, of the same input, a number b and a number a for each head. With beta = sigmoid(b) and
    g = -exp(A) softplus(a + dt), where `decay` and `dt_bias` name the tensors [heads] of A and dt, a head's state S
    becomes exp(g) S + k (beta (v - exp(g) S^T k))^T, and its output S^T q, for q and k of length one and q over
    sqrt(key_dim). Each of the `heads` reads the query and key of heads / key_heads neighbours. Outputs are normed over
    each head (`head_norm`) and multiplied by SiLU(z) before `out`. Where they lie `by_key_head`, what is projected is
    for each key head its query, its key, and the values and the z of those heads that read them; gates likewise.
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
    output_norm: NormSpec | None = None
    residual_scale: float = 1.0

    @property
    def unquantized(self) -> tuple[LinearSpec, ...]:
        """Linears that are never stored quantized: they are small, and what they make stands in an exponent."""
        return self.gates

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        """As `PartSpec.products`."""
        return {"recurrent_in": self.projections, "recurrent_out": (self.out,)}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        """As `PartSpec.inner_norms`."""
        return (self.head_norm,)

    def input_source(self, product: str) -> InputSource:
        # The norm feeds the gates too; the norm of heads undoes a factor.
        return None

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Names and shapes of what is no norm and no product."""
        yield from self.convolution.tensors()
        yield self.decay, (self.heads,)
        yield self.dt_bias, (self.heads,)

    def state_shapes(self) -> tuple[Shape, ...]:
        """Shapes of what is kept of a sequence."""
        return self.convolution.state_shape, (self.heads, self.key_dim, self.value_dim)

    def forward_values(self) -> int:
        """Of each token: what is projected, maybe put in order, and convolved, queries and keys in fp32, what is read,
        gated, projected."""
        projected = sum(linear.out_features for linear in (*self.projections, *self.gates)) * (1 + self.by_key_head)
        exact = 2 * 2 * self.key_heads * self.key_dim
        return projected + self.convolution.channels + exact + 2 * self.out.in_features + self.out.out_features

    def training_values(self) -> int:
        """Of each token in a forward and backward pass: the same and their gradients, what the convolution sums, and
        of each head its part of six matrices [64, 64] of a chunk and six copies of its query, key and value."""
        chunk = 6 * self.heads * (64 + 2 * self.key_dim + self.value_dim)
        return 2 * self.forward_values() + 2 * self.convolution.taps * self.convolution.channels + chunk


@dataclass(frozen=True)
class ShortConvSpec:
    """A gated short convolution: B, C and x side by side, C * convolution(B * x), projected."""

    norm: NormSpec | None
    projection: LinearSpec
    convolution: ConvolutionSpec
    out: LinearSpec
    output_norm: NormSpec | None = None
    residual_scale: float = 1.0

    @property
    def unquantized(self) -> tuple[LinearSpec, ...]:
        """As `DeltaNetSpec.kept`."""
        return ()

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        """As `PartSpec.products`."""
        return {"recurrent_in": (self.projection,), "recurrent_out": (self.out,)}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        """As `PartSpec.inner_norms`."""
        return ()

    def input_source(self, product: str) -> InputSource:
        """As `PartSpec.input_source`: rows of C are factors of what is projected at last."""
        if product == "recurrent_in":
            return self.norm
        size = self.convolution.channels
        return OutputRows("recurrent_in", size, 1, 1, size)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """As `DeltaNetSpec.tensors`."""
        return self.convolution.tensors()

    def state_shapes(self) -> tuple[Shape, ...]:
        """As `DeltaNetSpec.states`."""
        return (self.convolution.state_shape,)

    def forward_values(self) -> int:
        """As `DeltaNetSpec.pass_values`: what is projected, B * x, convolved, gated, projected."""
        return 6 * self.convolution.channels + self.out.out_features

    def training_values(self) -> int:
        """As `DeltaNetSpec.trained_values`."""
        return 2 * self.forward_values() + 2 * self.convolution.taps * self.convolution.channels


RecurrentSpec = DeltaNetSpec | ShortConvSpec
