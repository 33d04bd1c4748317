"""Granite 3 with experts (1B-A400M, 3B-A800M): Granite with experts, a softmax over the selected ones."""

from dataclasses import replace

from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.families import granite
from mycli.runtime.utils.json_fields import Fields

EXPERT_NAMES = ExpertNames(
    "block_sparse_moe",
    router="router.layer",
    stacked_gate_up="input_linear.weight",
    stacked_down="output_linear.weight",
    stacked=True,
)


def mixture(raw: Fields) -> MoeLayers:
    count, top_k = read_expert_counts(raw, "num_local_experts", raw.integer("num_hidden_layers"), default=(8, 2))
    return MoeLayers(count, RoutingSpec(top_k, normalize=True), raw.integer("intermediate_size"), EXPERT_NAMES)


def read(raw: Fields) -> ModelConfig:
    return replace(granite.read_granite(raw, EXPERT_KEYS), build_layer=mixture(raw))
