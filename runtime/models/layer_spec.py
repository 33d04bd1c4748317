"""What one decoder layer is, declared once for everyone who has to know.

Running a layer, calibrating it, rescaling it, tuning it, counting its memory and fusing its kernels all read the same
declaration. A layer is a sequence of parts on the residual stream, each of which names its norms, its products, and
what makes their inputs. Knows names and shapes of tensors. Does not import torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mycli.runtime.models.experts_spec import ExpertsSpec
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
from mycli.runtime.models.recurrent_spec import RecurrentSpec


@dataclass(frozen=True)
class PerLayerSpec:
    """What a layer is told of each token itself [..., width]: gate, activation(gate) * told, projection."""

    gate: LinearSpec
    projection: LinearSpec
    output_norm: NormSpec | None
    activation: ActivationName
    norm: NormSpec | None = None
    residual_scale: float = 1.0

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        """As `PartSpec.products`."""
        return {"per_layer_gate": (self.gate,), "per_layer_projection": (self.projection,)}

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        """As `PartSpec.inner_norms`."""
        return ()

    def input_source(self, product: str) -> InputSource:
        """As `PartSpec.input_source`. The gate reads the residual stream, the projection an activation."""
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
    mixer: AttentionSpec | RecurrentSpec
    mlp: MlpSpec | ExpertsSpec
    parallel: bool = False
    per_layer: PerLayerSpec | None = None
    layer_scalar: str | None = None
    ignored_prefixes: tuple[str, ...] = ()

    @property
    def attention(self) -> AttentionSpec:
        """The mixer of a layer that attends."""
        assert isinstance(self.mixer, AttentionSpec), "asked of layers that attend only"
        return self.mixer

    @property
    def recurrent(self) -> RecurrentSpec | None:
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
    def unquantized(self) -> tuple[LinearSpec, ...]:
        """Its linears that are never stored quantized."""
        mixed = () if self.recurrent is None else self.recurrent.unquantized
        return (*mixed, *self.mlp.unquantized) if isinstance(self.mlp, ExpertsSpec) else mixed

    def norms(self) -> list[NormSpec]:
        """The norms of the layer that have a tensor."""
        streams = [norm for part in self.parts for norm in (part.norm, part.output_norm)]
        inner = [norm for part in self.parts for norm in part.inner_norms()]
        return [norm for norm in (*streams, *inner) if norm is not None and norm.name is not None]

    def input_source(self, product: str) -> InputSource:
        """What makes the inputs of a product one by one; None where no single operation does (a residual stream), or
        where it makes those of another product too."""
        source = next(part.input_source(product) for part in self.parts if product in part.products())
        return None if self.parallel and isinstance(source, NormSpec) else source

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Names and shapes of the layer's tensors in an unquantized checkpoint."""
        for norm in self.norms():
            yield norm.tensor, (norm.size,)
        if self.recurrent is not None:
            yield from self.recurrent.tensors()
        for linears in (self.unquantized, *self.products().values()):
            for linear in linears:
                yield f"{linear.name}.weight", (linear.out_features, linear.in_features)
                if linear.bias:
                    yield f"{linear.name}.bias", (linear.out_features,)
        if self.recurrent is None and self.attention.sinks is not None:
            yield self.attention.sinks, (self.attention.heads,)
        if isinstance(self.mlp, ExpertsSpec):
            yield from self.mlp.tensors()
        if self.layer_scalar is not None:
            yield self.layer_scalar, (1,)
