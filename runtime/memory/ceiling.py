"""The upper bound that memory bandwidth sets on decoding speed: bytes read per step over bytes read per second."""

from collections.abc import Iterator
from dataclasses import replace

from mycli.runtime.memory.estimate import as_on_device, state_bytes
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.weights import head_bytes, linears_bytes, weight_bytes
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.latent_spec import LatentAttentionSpec
from mycli.runtime.models.part_spec import AttentionSpec


def bytes_per_step(plan: MemoryPlan, depth: int) -> int:
    # Every block, the head, and the cache of `depth` tokens.
    plan = replace(as_on_device(plan), expert_slots=None)
    cached = 2 * state_bytes(plan.config)  # states are read and written back
    for spec in plan.config.layer_specs:
        if not isinstance(spec.mixer, AttentionSpec | LatentAttentionSpec):
            continue
        window = chunk = source = None
        if spec.latent is None:
            window, chunk, source = spec.attention.window, spec.attention.chunk, spec.attention.kv_source
        # Of a chunk the last token reads the most, which is counted.
        read = min(depth, window or depth, chunk or depth)
        cached += read * plan.token_bytes(spec.index if source is None else source)
    # Of the tables of per-layer inputs and positions one row per sequence is read; the projections whole.
    tables = (*plan.config.per_layer_linears()[:1], *plan.config.position_tables())
    outside = sum(table.in_features * plan.batch for table in tables)
    projections = [linear for linear in plan.config.dense_linears() if linear not in tables]
    outside += sum(linear.out_features * linear.in_features for linear in projections)
    unread = int(sum(idle * nbytes for idle, nbytes in _expert_layers(plan)))
    return weight_bytes(plan) - unread + head_bytes(plan) + outside * plan.value_bytes + cached * plan.batch


def _expert_layers(plan: MemoryPlan) -> Iterator[tuple[float, int]]:
    # For each MoE layer the expected share of experts that no token of the batch chooses, were they chosen at random,
    # and the bytes of all its experts.
    for spec in plan.config.layer_specs:
        if isinstance(spec.mlp, ExpertsSpec):
            linears = (linear for mlp in spec.mlp.experts for linear in mlp.linears)
            yield (spec.mlp.inactive_experts / len(spec.mlp.experts)) ** plan.batch, linears_bytes(plan, linears)


def chosen_expert_bytes(plan: MemoryPlan) -> int:
    """Return the expected bytes of the experts that the tokens of the batch choose in a decode step."""
    return int(sum((1 - idle) * nbytes for idle, nbytes in _expert_layers(plan)))


def tokens_per_second_from_disk(plan: MemoryPlan, depth: int, memory: float, disk: float) -> float:
    # Every chosen expert is read from disk first; rates are in GB/s.
    seconds = plan.batch / tokens_per_second(plan, depth, memory) + chosen_expert_bytes(plan) / disk / 1e9
    return plan.batch / seconds


def tokens_per_second(plan: MemoryPlan, depth: int, gigabytes_per_second: float) -> float:
    return plan.batch * gigabytes_per_second * 1e9 / bytes_per_step(plan, depth)
