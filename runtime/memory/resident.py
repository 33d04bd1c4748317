"""How many experts of each MoE layer are in memory if not all fit; the rest are read from disk on demand."""

from dataclasses import replace

from mycli.runtime.errors import ResourceError, UsageError
from mycli.runtime.memory.estimate import estimate
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.weights import linears_bytes
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.utils.units import human_bytes

LEFT_FREE = 16  # 1 / 16 of the room is left to the page cache, which serves experts that are read again soon


def mixtures(config: ModelConfig) -> list[ExpertsSpec]:
    return [spec.mlp for spec in config.layer_specs if isinstance(spec.mlp, ExpertsSpec)]


def most_experts(config: ModelConfig) -> int:
    return max((len(mixture.experts) for mixture in mixtures(config)), default=0)


def active_slots(config: ModelConfig) -> int:
    return max((mixture.top_k for mixture in mixtures(config)), default=0)


def slot_bytes(plan: MemoryPlan) -> int:
    """Return the bytes of one expert slot in every MoE layer: that of the largest expert."""
    return sum(max(linears_bytes(plan, mlp.linears) for mlp in spec.experts) for spec in mixtures(plan.config))


def can_stream_experts(plan: MemoryPlan) -> bool:
    """Return whether experts can be read on demand: on the CPU, without dense copies."""
    return not plan.gpu and plan.prompt_copy == "none" and most_experts(plan.config) > 0


def with_active_experts(plan: MemoryPlan) -> MemoryPlan:
    """Return `plan` with the experts of one token in memory, the fewest that avoid reading a layer in parts."""
    return replace(plan, expert_slots=active_slots(plan.config))


def with_fitting_experts(plan: MemoryPlan, free: int, limit: int | None = None, started: bool = False) -> MemoryPlan:
    """Return `plan` with as many experts in memory as fit `free` bytes, or `limit` bytes if that is less.

    `started`: as in `longest_context`. Raises UsageError for a limit on a model whose experts cannot be streamed,
    ResourceError for one below the size of one expert.
    """
    if not can_stream_experts(plan):
        if limit is None:
            return plan
        message = "an expert memory limit applies only to MoE models on the CPU, without dense copies"
        raise UsageError(message, "omit the limit")
    slot, most = slot_bytes(plan), most_experts(plan.config)
    if limit is not None and limit < slot:
        problem = f"{human_bytes(limit)} for experts: one expert of each layer takes {human_bytes(slot)}"
        raise ResourceError(problem, f"the experts of one token take {human_bytes(slot * active_slots(plan.config))}")
    rest = estimate(replace(plan, expert_slots=0))
    room = free - (rest.needed if started else rest.total)
    if limit is not None and limit < room:
        slots = limit // slot
    else:  # at least the experts of one token, even if they do not fit: the preflight then says what is missing
        slots = most if slot * most <= room else max((room - room // LEFT_FREE) // slot, active_slots(plan.config))
    return replace(plan, expert_slots=None if slots >= most else slots)
