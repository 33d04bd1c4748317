"""Which experts of a mixture are in memory where not all fit: as many of each layer as there is room for.

Knows plans and their estimates. Does not import torch, and does not know how much memory is free: the caller says.
"""

from dataclasses import replace

from mycli.runtime.errors import ResourceError, UsageError
from mycli.runtime.memory.estimate import estimate
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.weights import linears_bytes
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.utils.units import human_bytes

LEFT_FREE = 16  # one part in so many of the room is the page cache's, from which a file is read again soon


def mixtures(config: ModelConfig) -> list[ExpertsSpec]:
    """Of the layers that choose among experts."""
    return [spec.mlp for spec in config.layer_specs if isinstance(spec.mlp, ExpertsSpec)]


def most_experts(config: ModelConfig) -> int:
    """Of a layer; 0 where none has any."""
    return max((len(mixture.experts) for mixture in mixtures(config)), default=0)


def active_slots(config: ModelConfig) -> int:
    """Slots of each layer that hold what one token goes through."""
    return max((mixture.top_k for mixture in mixtures(config)), default=0)


def slot_bytes(plan: MemoryPlan) -> int:
    """One expert of every layer, the largest of each."""
    return sum(max(linears_bytes(plan, each.linears) for each in one.experts) for one in mixtures(plan.config))


def can_keep_some(plan: MemoryPlan) -> bool:
    """Whether experts can be read when they are chosen: on the CPU, where no second copy of the weights is kept."""
    return not plan.gpu and not plan.shadow and most_experts(plan.config) > 0


def keep_active(plan: MemoryPlan) -> MemoryPlan:
    """`plan` with the fewest experts in memory that let a token go through a layer at once."""
    return replace(plan, expert_slots=active_slots(plan.config))


def keep_fitting(plan: MemoryPlan, free: int, limit: int | None = None, started: bool = False) -> MemoryPlan:
    """`plan` with as many experts of each layer in memory as `free` bytes hold beside the rest, or `limit` bytes.

    All of them where they fit, and at least what one token goes through, whether that fits or not; fewer where a limit
    says so. `started` as in `longest_context`. Raises UsageError for a limit where nothing can be read from disk, and
    ResourceError for one that does not hold one expert of each layer.
    """
    if not can_keep_some(plan):
        if limit is None:
            return plan
        raise UsageError("no bound on experts is kept here", "it is for mixtures of experts on the CPU, without a copy")
    each, most = slot_bytes(plan), most_experts(plan.config)
    if limit is not None and limit < each:
        problem = f"{human_bytes(limit)} for experts, but one of each layer takes {human_bytes(each)}"
        raise ResourceError(problem, f"{human_bytes(each * active_slots(plan.config))} hold what a token goes through")
    rest = estimate(replace(plan, expert_slots=0))
    room = free - (rest.needed if started else rest.total)
    if limit is not None and limit < room:
        slots = limit // each
    else:
        slots = most if each * most <= room else max((room - room // LEFT_FREE) // each, active_slots(plan.config))
    return replace(plan, expert_slots=None if slots >= most else slots)
