"""How fast a model could decode at best: what a step must read of memory, over how fast that is read.

Knows plans and the sums of `runtime.memory.estimate`. Does not import torch, and measures nothing.
"""

from collections.abc import Iterator
from dataclasses import replace

from mycli.runtime.memory.estimate import state_bytes
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.weights import head_bytes, linears_bytes, weight_bytes
from mycli.runtime.models.experts_spec import ExpertsSpec


def bytes_per_step(plan: MemoryPlan, depth: int) -> int:
    """Bytes a decoding step must read: every block, the head, and the cache up to `depth` tokens (or the window).

    Of experts those that the tokens of the batch choose, as many as there would be if each chose by lot, all in memory.
    States are read, and written back.
    """
    plan = replace(plan, expert_slots=None)
    cached = 2 * state_bytes(plan.config)
    for spec in plan.config.layer_specs:
        if spec.recurrent is not None:
            continue
        attention = spec.attention
        read = spec.index if attention.kv_source is None else attention.kv_source
        cached += min(depth, attention.window or depth) * plan.token_bytes(read)
    told = plan.config.per_layer_linears()
    beside = sum(told[0].in_features * plan.batch + each.out_features * each.in_features for each in told[1:])
    weights = weight_bytes(plan) - _unread_experts(plan)
    return weights + head_bytes(plan) + beside * plan.value_bytes + cached * plan.batch


def _unread_experts(plan: MemoryPlan) -> int:
    """Bytes of experts that no token of the batch is expected to choose."""
    return int(sum(idle * nbytes for idle, nbytes in _expert_layers(plan)))


def _expert_layers(plan: MemoryPlan) -> Iterator[tuple[float, int]]:
    """Of each layer with experts the share that no token of the batch is expected to choose, and the bytes of all."""
    for spec in plan.config.layer_specs:
        if isinstance(spec.mlp, ExpertsSpec):
            linears = (each for mlp in spec.mlp.experts for each in mlp.linears)
            yield (spec.mlp.inactive_experts / len(spec.mlp.experts)) ** plan.batch, linears_bytes(plan, linears)


def chosen_expert_bytes(plan: MemoryPlan) -> int:
    """Bytes of the experts that the tokens of the batch are expected to choose in a decoding step."""
    return int(sum((1 - idle) * nbytes for idle, nbytes in _expert_layers(plan)))


def tokens_per_second_from_disk(plan: MemoryPlan, depth: int, memory: float, disk: float) -> float:
    """As `tokens_per_second`, where no expert that is chosen is in memory: each is read at `disk` (10^9 bytes per
    second) first."""
    seconds = plan.batch / tokens_per_second(plan, depth, memory) + chosen_expert_bytes(plan) / disk / 1e9
    return plan.batch / seconds


def tokens_per_second(plan: MemoryPlan, depth: int, gigabytes_per_second: float) -> float:
    """The ceiling that memory bandwidth (10^9 bytes per second) sets on decoding: a batch of tokens a reading."""
    return plan.batch * gigabytes_per_second * 1e9 / bytes_per_step(plan, depth)
