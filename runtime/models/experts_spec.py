"""A mixture of experts in the place of an MLP: its router, its experts, one that all tokens go through, their norms.

Knows names and shapes of tensors. Does not know families, nor how tokens are routed. Does not import torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mycli.runtime.models.part_spec import ActivationName, InputSource, LinearSpec, MlpSpec, NormSpec, OutputRows, Shape

ScoringName = Literal["softmax", "sigmoid"]


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
class RoutingSpec:
    """How a token's scores choose `top_k` experts, and what weights these get.

    Scores become values, by a softmax over all of them or each by its `sigmoid`; the highest are chosen. What a
    correction adds to values counts for the choice alone. Of `groups` of neighbours, equally many in each, those
    `top_groups` take part whose two highest values sum highest. Weights are the values of the chosen, where
    `normalized` over their sum and `margin`, times `scale`.
    """

    top_k: int
    normalize: bool
    scoring: ScoringName = "softmax"
    groups: int = 1
    top_groups: int = 1
    epsilon: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts (arXiv 1701.06538): MLPs alike in shape, of which each token goes through a few.

    The `router` scores the experts for a token, `choice` says what follows; `correction` names a tensor, one value for
    each expert, and has its shape. Router and gate decide, and are never stored quantized. `stacks`: tensors that hold
    those of all experts.

    All read what `norm` makes, unless there is none: then the router, the experts and the shared one read the stream
    through norms of their own, `router_norm`, `expert_norm` and the shared MLP's; `expert_output_norm` is of what the
    experts make together. `scales` names a tensor [experts]: factors of the weights.
    """

    norm: NormSpec | None
    router: LinearSpec
    experts: tuple[MlpSpec, ...]
    routing: RoutingSpec
    stacks: tuple[StackSpec, ...] = ()
    shared: SharedExpertSpec | None = None
    output_norm: NormSpec | None = None
    residual_scale: float = 1.0
    router_norm: NormSpec | None = None
    expert_norm: NormSpec | None = None
    expert_output_norm: NormSpec | None = None
    expert_scales: str | None = None
    correction_bias: tuple[str, Shape] | None = None

    @property
    def top_k(self) -> int:
        """How many experts a token goes through."""
        return self.routing.top_k

    @property
    def size(self) -> int:
        """Inner width of one expert."""
        return self.experts[0].size

    @property
    def activation(self) -> ActivationName:
        """Of every expert."""
        return self.experts[0].activation

    @property
    def inactive_experts(self) -> int:
        """How many experts a token does not go through."""
        return len(self.experts) - self.top_k

    @property
    def parameters_per_expert(self) -> int:
        """Of one expert: weights and biases."""
        return sum(linear.out_features * (linear.in_features + linear.bias) for linear in self.experts[0].linears)

    @property
    def unquantized(self) -> tuple[LinearSpec, ...]:
        """The linears that are never stored quantized."""
        gate = None if self.shared is None else self.shared.gate
        return (self.router,) if gate is None else (self.router, gate)

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        """As `PartSpec.products`: those of the shared expert, then `experts.<index>.gate_up` and `.down` of each."""
        mlps = {} if self.shared is None else {"shared": self.shared.mlp}
        mlps |= {f"experts.{index}": expert for index, expert in enumerate(self.experts)}
        return {f"{name}.{own}": linears for name, mlp in mlps.items() for own, linears in mlp.products().items()}

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Names and shapes of what is no norm and no linear."""
        if self.expert_scales is not None:
            yield self.expert_scales, (len(self.experts),)
        if self.correction_bias is not None:
            yield self.correction_bias

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        """As `PartSpec.inner_norms`."""
        beside = () if self.shared is None else (self.shared.mlp.norm, self.shared.mlp.output_norm)
        return (self.router_norm, self.expert_norm, self.expert_output_norm, *beside)

    def input_source(self, product: str) -> InputSource:
        """As `PartSpec.input_source`. What a norm makes for all experts goes to each alike, maybe to the router too; a
        shared expert may have one for itself."""
        owner, _, own = product.rpartition(".")
        mlp = self.experts[int(owner.removeprefix("experts."))] if owner.startswith("experts.") else self._shared()
        source = mlp.input_source(own)
        return replace(source, product=f"{owner}.{source.product}") if isinstance(source, OutputRows) else source

    def _shared(self) -> MlpSpec:
        assert self.shared is not None
        return self.shared.mlp
