"""Experts in place of a layer's MLP: what most families have in common, from the fields of their configs.

A family says how many there are, how they are chosen and what their tensors are called. Does not import torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts_spec import ExpertsSpec, RoutingSpec, SharedExpertSpec, StackSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, MlpSpec, Shape
from mycli.runtime.utils.json_fields import Fields

EXPERT_KEYS = ("num_experts", "num_local_experts")  # those of `hf_config.NEUTRAL` that count experts
MAX_EXPERTS = 1 << 15  # of all layers together: about as many as a folder may have tensors for


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the parts of experts, within `model.layers.<index>.`, or there itself without `block`."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    shared_gate: str | None = "shared_expert_gate"  # None: what it makes is added as it is
    correction_bias: str | None = None
    correction_rows: tuple[int, ...] = ()  # what its shape says before the experts
    stacked_gate_up: str = "experts.gate_up_proj"  # where a file has one tensor of all experts
    stacked_down: str = "experts.down_proj"

    def corrected(self, block: str, count: int) -> tuple[str, Shape] | None:
        """As `ExpertsSpec.correction`, of `count` experts."""
        return (
            None
            if self.correction_bias is None
            else (f"{block}.{self.correction_bias}", (*self.correction_rows, count))
        )


@dataclass(frozen=True)
class MoeLayers:
    """Experts of width `size`, of which tokens choose; `shared`: the width of one that all go through.

    `dense`: layers that have an MLP instead. `base` declares the layers whose MLP the experts replace.
    """

    count: int
    routing: RoutingSpec
    size: int
    names: ExpertNames = ExpertNames()
    dense: frozenset[int] = frozenset()
    shared: int = 0
    base: Callable[[ModelConfig, int], LayerSpec] = llama_layer

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        """A layer of the kind of `base` with these experts; as `ModelConfig.build_layer`."""
        return self.replace_mlp(self.base(config, index), config)

    def replace_mlp(self, layer: LayerSpec, config: ModelConfig) -> LayerSpec:
        """`layer` with the experts in place of its MLP, unless it is one of the `dense`."""
        if layer.index in self.dense:
            return layer
        names, block = self.names, f"model.layers.{layer.index}.{self.names.block}".rstrip(".")
        bias = f"{block}.{names.correction_bias}", (*names.correction_rows, self.count)
        shared = None
        if self.shared:
            gate = LinearSpec(f"{block}.{names.shared_gate}", 1, config.hidden_size) if names.shared_gate else None
            shared = SharedExpertSpec(self._mlp(f"{block}.{names.shared}", self.shared, config), gate)
        experts = ExpertsSpec(
            norm=layer.mlp.norm,
            router=LinearSpec(f"{block}.{names.router}", self.count, config.hidden_size),
            experts=tuple(self._mlp(f"{block}.experts.{each}", self.size, config) for each in range(self.count)),
            routing=self.routing,
            stacks=self._stacks(block),
            shared=shared,
            output_norm=layer.mlp.output_norm,
            residual_scale=layer.mlp.residual_scale,
            correction_bias=bias if names.correction_bias else None,
        )
        return replace(layer, mlp=experts)

    def _stacks(self, block: str) -> tuple[StackSpec, ...]:
        names = self.names
        experts = [f"{block}.experts.{each}" for each in range(self.count)]
        gate_up = tuple(f"{expert}.{own}.weight" for expert in experts for own in (names.gate, names.up))
        return (
            StackSpec(f"{block}.{names.stacked_gate_up}", gate_up),
            StackSpec(f"{block}.{names.stacked_down}", tuple(f"{expert}.{names.down}.weight" for expert in experts)),
        )

    def _mlp(self, prefix: str, size: int, config: ModelConfig) -> MlpSpec:
        names, hidden = self.names, config.hidden_size
        gate_up = LinearSpec(f"{prefix}.{names.gate}", size, hidden), LinearSpec(f"{prefix}.{names.up}", size, hidden)
        return MlpSpec(size, None, gate_up, LinearSpec(f"{prefix}.{names.down}", hidden, size), None, config.activation)


def read_routing(raw: Fields, count: int, top_k: int) -> RoutingSpec:
    """How one of `count` experts is chosen by the keys that DeepSeek-V3's kin write: sigmoids, groups, a factor.

    Raises ModelError for groups that are not of the same size, of fewer than two experts, or that hold too few.
    """
    groups = raw.integer("n_group", 1, high=count)
    top_groups = raw.integer("topk_group", 1, high=groups)
    if count % groups or groups > 1 and count < 2 * groups:
        raise raw.fail("n_group", f"= {groups} does not divide {count} experts into groups of two or more")
    if top_k > top_groups * (count // groups):
        raise raw.fail("topk_group", f"= {top_groups} of {groups} groups hold fewer than {top_k} experts")
    return RoutingSpec(
        top_k,
        raw.boolean("norm_topk_prob", True),
        "sigmoid",
        groups,
        top_groups,
        scale=raw.number("routed_scaling_factor", 1.0, low=1e-6, high=1e6),
    )


def read_expert_counts(
    raw: Fields, key: str, layers: int, usual: tuple[int, int], chosen: str = "num_experts_per_tok"
) -> tuple[int, int]:
    """How many experts a layer has, by `key`, and how many a token goes through; `usual` where that is not said.

    Raises ModelError for more chosen than there are, and for more experts than a folder can hold.
    """
    count = raw.integer(key, usual[0])
    if count * layers > MAX_EXPERTS:
        raise raw.fail(key, f"= {count} in {layers} layers: more than {MAX_EXPERTS} experts", "the file may be damaged")
    return count, raw.integer(chosen, usual[1], high=count)
