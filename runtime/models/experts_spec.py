"""A mixture of experts in the place of an MLP: its router, its experts, one that all tokens go through, their norms.

Knows names and shapes of tensors. Does not know families, nor how tokens are routed. Does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mycli.runtime.models.part_spec import ActivationName, LinearSpec, MadeBy, MlpSpec, NormSpec, OutputRows


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
