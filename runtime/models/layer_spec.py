"""Declaration of one decoder layer: a sequence of parts on the residual stream, with their norms, products and tensors.

Running, calibration, AWQ, tuning, the memory model and kernel fusion all read this one declaration. Without torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.latent_spec import LatentAttentionSpec
from mycli.runtime.models.part_spec import (
    ActivationName,
    AttentionSpec,
    InputSource,
    LinearSpec,
    MlpSpec,
    NormSpec,
    PartSpec,
    Shape,
)
from mycli.runtime.models.recurrent_spec import MambaSpec, RecurrentSpec


@dataclass(frozen=True)
class PerLayerSpec:
    """The part that adds per-layer inputs [..., width] (Gemma 4): projection(activation(gate(x)) * inputs)."""

    gate: LinearSpec
    projection: LinearSpec
    output_norm: NormSpec | None
    activation: ActivationName
    norm: NormSpec | None = None
    residual_scale: float = 1.0

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        return {"per_layer_gate": (self.gate,), "per_layer_projection": (self.projection,)}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        return ()

    def input_source(self, product: str) -> InputSource:
        return self.norm if product == "per_layer_gate" else None


@dataclass(frozen=True)
class LaurelSpec:
    """A learned augmented residual (LAuReL, arXiv 2411.07501): y + norm(right(left(y))), y being attention's input.

    It is added to attention's sum, and the result divided by sqrt(2).
    """

    left: LinearSpec
    right: LinearSpec
    norm: NormSpec


@dataclass(frozen=True)
class StreamsSpec:
    """Alternating updates (AltUp, arXiv 2301.13310): `count` residual streams side by side; a layer computes one.

    With m(x) = tanh(router(norm(x))): before a layer, stream i becomes s_i + sum_j prediction(m(s))_ij s_j, with the
    `active` stream s. After it, each stream gets 1 + correction(m(x)) times what the layer changed in the active
    one, x being its output. Per-layer inputs are gated by the active stream, with `scales` times tensor `scale`
    [hidden], and added to all streams but the first.
    """

    count: int
    active: int
    norm: NormSpec
    router: LinearSpec
    prediction: LinearSpec
    correction: LinearSpec
    scale: str
    scales: bool = True

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        return self.router, self.prediction, self.correction


@dataclass(frozen=True)
class LayerSpec:
    """One layer: a token mixer (attention or a recurrent layer), an MLP or experts, and maybe per-layer inputs.

    Layers of Nemotron-H and Mamba-2 have either a mixer or an MLP. With `streams`, mixer, `laurel`, MLP and per-layer
    inputs are all present.
    """

    index: int
    mixer: AttentionSpec | LatentAttentionSpec | RecurrentSpec | None
    mlp: MlpSpec | ExpertsSpec | None
    # Mixer and MLP are both added to the layer's input. The MLP reads it through the mixer's norm, or one of its own.
    parallel: bool = False
    state_space: MambaSpec | None = None  # reads the layer's input next to attention; both are added to it (Falcon-H1)
    per_layer: PerLayerSpec | None = None
    laurel: LaurelSpec | None = None
    streams: StreamsSpec | None = None
    layer_scalar: str | None = None  # tensor [1] that multiplies the layer's output
    # Tensors [hidden] that multiply the residual stream before the sums of mixer and MLP (Doge).
    residual_gains: tuple[str, str] | None = None
    ignored_prefixes: tuple[str, ...] = ()  # of tensors that checkpoints may contain and nothing reads

    @property
    def attention(self) -> AttentionSpec:
        assert isinstance(self.mixer, AttentionSpec), f"layer {self.index} has no attention"
        return self.mixer

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The mixer with a recurrent state; None where the layer has none."""
        return self.state_space if isinstance(self.mixer, AttentionSpec | LatentAttentionSpec) else self.mixer

    @property
    def latent(self) -> LatentAttentionSpec | None:
        """The mixer of a layer with latent attention; None where it is another."""
        return self.mixer if isinstance(self.mixer, LatentAttentionSpec) else None

    @property
    def kv_source(self) -> int | None:
        """The layer whose keys and values this one reads; None where it reads no other layer's."""
        return self.mixer.kv_source if isinstance(self.mixer, AttentionSpec) else None

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        parts = (self.mixer, self.state_space, self.mlp, self.per_layer)
        return tuple(part for part in parts if part is not None)

    @property
    def dense_mlp(self) -> MlpSpec:
        assert isinstance(self.mlp, MlpSpec), f"layer {self.index} has experts"
        return self.mlp

    def products(self) -> dict[str, tuple[LinearSpec, ...]]:
        """Return the linears of each product by its name, in order of execution; their outputs are concatenated."""
        return {name: linears for part in self.parts for name, linears in part.products().items()}

    @property
    def unquantized(self) -> tuple[LinearSpec, ...]:
        """Linears that are never quantized: routers, gates of heads and of recurrent layers, small and sensitive."""
        gates = () if self.mixer is None else self.mixer.unquantized
        if self.laurel is not None:
            gates = (*gates, self.laurel.left, self.laurel.right)
        if self.streams is not None:
            gates = (*gates, *self.streams.linears)
        return (*gates, *self.mlp.unquantized) if isinstance(self.mlp, ExpertsSpec) else gates

    def norms(self) -> list[NormSpec]:
        """Return the norms that have a tensor; of two with one tensor, both."""
        streams = [norm for part in self.parts for norm in (part.norm, part.output_norm)]
        inner = [norm for part in self.parts for norm in part.inner_norms()]
        others = [spec.norm for spec in (self.laurel, self.streams) if spec is not None]
        return [norm for norm in (*streams, *inner, *others) if norm is not None and norm.name is not None]

    def input_source(self, product: str) -> InputSource:
        """Return what produces the inputs of `product`, as `PartSpec.input_source`; None if it feeds others too."""
        part = next(part for part in self.parts if product in part.products())
        source = part.input_source(product)
        shared = (self.parallel and self.mlp is not None and self.mlp.norm is None) or (
            self.state_space is not None and product in ("qkv", "recurrent_in")
        )
        shared = shared or (isinstance(part, AttentionSpec | MlpSpec) and part.normed_residual)
        shared = shared or (self.laurel is not None and product == "qkv")
        if isinstance(source, NormSpec) and (shared or source.name is None):
            return None  # a norm without a tensor cannot absorb a factor
        return source

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of each tensor of the layer in an unquantized checkpoint."""
        yield from dict(tensor for norm in self.norms() for tensor in norm.tensors()).items()
        if self.recurrent is not None:
            yield from self.recurrent.tensors()
        for linears in (self.unquantized, *self.products().values()):
            for linear in linears:
                yield f"{linear.name}.weight", (linear.out_features, linear.in_features)
                if linear.bias:
                    yield f"{linear.name}.bias", (linear.out_features,)
        if isinstance(self.mixer, AttentionSpec):
            yield from self.mixer.tensors()
        if isinstance(self.mlp, ExpertsSpec):
            yield from self.mlp.tensors()
        elif self.mlp is not None:
            yield from self.mlp.parameters
        if self.streams is not None:
            yield self.streams.scale, (self.streams.norm.size,)
        if self.layer_scalar is not None:
            yield self.layer_scalar, (1,)
        for name in self.residual_gains or ():
            assert self.mixer is not None
            *_, (last,) = self.mixer.products().values()
            yield name, (last.out_features,)
