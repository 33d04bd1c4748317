"""Declaration of a mixture of experts in place of an MLP: router, experts, shared expert, norms. Without torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mycli.runtime.models.part_spec import ActivationName, InputSource, LinearSpec, MlpSpec, NormSpec, OutputRows, Shape

# sigmoid_of_corrected: experts are chosen by the logits, plus a correction bias if there is one. sparse_mixer (PhiMoE):
# two experts, each weighted by a softmax over the logits that are close to its own.
ScoringName = Literal["softmax", "sigmoid", "sigmoid_of_corrected", "sparse_mixer"]


@dataclass(frozen=True)
class StackSpec:
    """A checkpoint tensor [experts, rows, ...] that stacks `parts`, in order, with the same number of rows each.

    transposed: the tensor is [experts, in_features, out_features], with one part for each expert. published: the
    family's files have it, not its parts.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    published: bool = False


@dataclass(frozen=True)
class SharedExpertSpec:
    """An MLP that every token goes through, times sigmoid(gate(x)) where there is a gate [1, hidden]."""

    mlp: MlpSpec
    gate: LinearSpec | None = None


@dataclass(frozen=True)
class RoutingSpec:
    """How the router logits of a token select `top_k` experts and their weights."""

    top_k: int
    normalize: bool  # divide weights by (their sum + epsilon)
    scoring: ScoringName = "softmax"  # over all logits, or the sigmoid of each; a correction bias only selects
    # DeepSeek-V3: experts form equal groups of neighbours; the top_groups with the largest sum of their `group_best`
    # highest scores take part.
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2  # 1 or 2
    epsilon: float = 0.0
    scale: float = 1.0  # multiplies the weights
    jitter: float = 0.0  # sparse_mixer: logits within 2 * jitter of the best, relative to it, are close
    softcap: float = 0.0  # logits become softcap * tanh(logit / softcap); 0: none


def stacked_product(product: str) -> str:
    """Return `experts.gate_up` or `experts.down` for the product of any expert, and other names unchanged."""
    owner, _, name = product.rpartition(".")
    return f"experts.{name}" if owner.startswith("experts.") else product


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts (arXiv 1701.06538): MLPs of one shape, of which each token goes through a few.

    Without `norm` (Gemma 4), router, experts and shared expert read the residual stream through norms of their own.
    """

    norm: NormSpec | None
    router: LinearSpec
    experts: tuple[MlpSpec, ...]
    routing: RoutingSpec
    stacks: tuple[StackSpec, ...] = ()  # checkpoint tensors that hold a parameter of all experts
    shared: SharedExpertSpec | None = None
    output_norm: NormSpec | None = None
    residual_scale: float = 1.0
    router_norm: NormSpec | None = None
    expert_norm: NormSpec | None = None
    expert_output_norm: NormSpec | None = None  # over the sum of experts
    expert_scales: str | None = None  # tensor [experts] that multiplies the weights
    weigh_inputs: bool = False  # the weight of an expert multiplies its input, not its output (Llama 4)
    correction_bias: tuple[str, Shape] | None = None  # tensor added to the scores for the selection, and its shape
    # Experts read a projection of the input and their sum is projected back (Nemotron 3); the router reads the input.
    enter: LinearSpec | None = None
    leave: LinearSpec | None = None
    normed_residual: bool = False  # as in `AttentionSpec`
    early_router: bool = False  # the router reads the input of the layer, before its mixer (SmallThinker)

    @property
    def top_k(self) -> int:
        return self.routing.top_k

    @property
    def size(self) -> int:
        """Intermediate size of one expert."""
        return self.experts[0].size

    @property
    def activation(self) -> ActivationName:
        return self.experts[0].activation

    @property
    def gated(self) -> bool:
        return self.experts[0].gated

    @property
    def inactive_experts(self) -> int:
        return len(self.experts) - self.top_k

    @property
    def parameters_per_expert(self) -> int:
        return sum(linear.out_features * (linear.in_features + linear.bias) for linear in self.experts[0].linears)

    @property
    def unquantized(self) -> tuple[LinearSpec, ...]:
        # Router and gate select experts; an error there changes the path of a token, not only its values.
        # The projections around experts are small, and all experts read their output.
        gate = None if self.shared is None else self.shared.gate
        return tuple(linear for linear in (self.router, gate, self.enter, self.leave) if linear is not None)

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        """Return `shared.gate_up` and `.down`, then `experts.<index>.gate_up` and `.down` of each expert."""
        mlps = {} if self.shared is None else {"shared": self.shared.mlp}
        mlps |= {f"experts.{index}": expert for index, expert in enumerate(self.experts)}
        products = ((name, product) for name, mlp in mlps.items() for product in mlp.products().items())
        return {f"{name}.{product}": linears for name, (product, linears) in products}

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of each tensor that is neither a norm nor a linear."""
        if self.expert_scales is not None:
            yield self.expert_scales, (len(self.experts),)
        if self.correction_bias is not None:
            yield self.correction_bias

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        shared = () if self.shared is None else (self.shared.mlp.norm, self.shared.mlp.output_norm)
        return (self.router_norm, self.expert_norm, self.expert_output_norm, *shared)

    def input_source(self, product: str) -> InputSource:
        # The norm feeds all experts, and maybe the router, so it is no source of one expert; MLPs of experts have none.
        owner, _, product = product.rpartition(".")
        if owner.startswith("experts."):
            mlp = self.experts[int(owner.removeprefix("experts."))]
        else:
            assert self.shared is not None
            mlp = self.shared.mlp
        source = mlp.input_source(product)
        return replace(source, product=f"{owner}.{source.product}") if isinstance(source, OutputRows) else source
