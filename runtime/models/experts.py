"""Experts in place of a layer's MLP: what most families have in common, from the fields of their configs.

A family says how many there are, how they are chosen and what their tensors are called. Does not import torch.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mycli.runtime.models.decoder_layer import decoder_layer
from mycli.runtime.models.experts_spec import ExpertsSpec, SharedExpertSpec, StackSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, MlpSpec
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:
    from mycli.runtime.models.config import ModelConfig

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
    stacked_gate_up: str = "experts.gate_up_proj"  # where a file has one tensor of all experts
    stacked_down: str = "experts.down_proj"


@dataclass(frozen=True)
class Mixture:
    """Experts of width `size`, of which a token goes through `top_k`; `shared`: the width of one that all go through.

    `dense`: layers that have an MLP instead. The rest is as in `ExpertsSpec`.
    """

    count: int
    top_k: int
    size: int
    normalized: bool
    names: ExpertNames = ExpertNames()
    dense: frozenset[int] = frozenset()
    shared: int = 0

    def __call__(self, config: "ModelConfig", index: int) -> LayerSpec:
        """A layer of the Llama kind with these experts; as `ModelConfig.declare`."""
        return self.put_into(decoder_layer(config, index), config)

    def put_into(self, layer: LayerSpec, config: "ModelConfig") -> LayerSpec:
        """`layer` with the experts in place of its MLP, unless it is one of the `dense`."""
        if layer.index in self.dense:
            return layer
        block = f"model.layers.{layer.index}.{self.names.block}".rstrip(".")
        shared = None
        if self.shared:
            mlp = self._mlp(f"{block}.shared_expert", self.shared, config)
            shared = SharedExpertSpec(mlp, LinearSpec(f"{block}.shared_expert_gate", 1, config.hidden_size))
        experts = ExpertsSpec(
            norm=layer.mlp.norm,
            router=LinearSpec(f"{block}.{self.names.router}", self.count, config.hidden_size),
            experts=tuple(self._mlp(f"{block}.experts.{each}", self.size, config) for each in range(self.count)),
            top_k=self.top_k,
            normalized=self.normalized,
            stacks=self._stacks(block),
            shared=shared,
            output_norm=layer.mlp.output_norm,
            residual=layer.mlp.residual,
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

    def _mlp(self, prefix: str, size: int, config: "ModelConfig") -> MlpSpec:
        names, hidden = self.names, config.hidden_size
        gate_up = LinearSpec(f"{prefix}.{names.gate}", size, hidden), LinearSpec(f"{prefix}.{names.up}", size, hidden)
        return MlpSpec(size, None, gate_up, LinearSpec(f"{prefix}.{names.down}", hidden, size), None, config.activation)


def read_counts(
    raw: Fields, key: str, layers: int, usual: tuple[int, int], chosen: str = "num_experts_per_tok"
) -> tuple[int, int]:
    """How many experts a layer has, by `key`, and how many a token goes through; `usual` where that is not said.

    Raises ModelError for more chosen than there are, and for more experts than a folder can hold.
    """
    count = raw.integer(key, usual[0])
    if count * layers > MAX_EXPERTS:
        raise raw.fail(key, f"= {count} in {layers} layers: more than {MAX_EXPERTS} experts", "the file may be damaged")
    return count, raw.integer(chosen, usual[1], high=count)
