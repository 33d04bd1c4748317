"""Bytes of weights: of blocks, of what lies before and behind them, of their dense copies. Does not import torch."""

from collections.abc import Iterable
from math import prod

from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, NormSpec
from mycli.runtime.models.recurrent_spec import STATE_BYTES


def block_bytes(plan: MemoryPlan, layer: int) -> int:
    """One block: its linears, norms and biases.

    A linear [N, K] is N x K values, or packed N x ceil(K x bits / 32) words of 4 bytes and N x K / group scales. A gain
    is values, or fp32 where it is a sum.
    """
    size, total = plan.value_bytes, 0
    for name, shape in plan.config.layer(layer).tensors():
        packing = plan.packings.get(name.removesuffix(".weight"))
        total += packing.bytes(shape[0], shape[1], plan.scale_bytes) if packing else prod(shape) * size
    spec = plan.config.layer(layer)
    if spec.recurrent is not None:
        total += sum(prod(shape) for _, shape in spec.recurrent.tensors()) * (STATE_BYTES - size)  # in fp32
    inner = (norm for part in spec.parts for norm in part.inner_norms() if norm is not None)
    total += sum(norm.size for norm in inner if norm.name is None) * size  # gains of one
    total -= _absent_bytes(plan, spec)
    return total + sum(_norm_bytes(plan, norm) - norm.size * size for norm in spec.norms())


def _absent_bytes(plan: MemoryPlan, spec: LayerSpec) -> int:
    """Experts of a layer that are not in memory: the smallest, where they differ, since any may be in a slot."""
    if plan.expert_slots is None or not isinstance(spec.mlp, ExpertsSpec):
        return 0
    sizes = sorted(linears_bytes(plan, expert.linears) for expert in spec.mlp.experts)
    return sum(sizes[: max(0, len(sizes) - plan.expert_slots)])


def linears_bytes(plan: MemoryPlan, linears: Iterable[LinearSpec]) -> int:
    """Weights and biases of linears, packed or dense."""
    total, size = 0, plan.value_bytes
    for each in linears:
        packing, dense = plan.packings.get(each.name), each.out_features * each.in_features * size
        total += packing.bytes(each.out_features, each.in_features, plan.scale_bytes) if packing else dense
        total += each.out_features * size * each.bias
    return total


def weight_bytes(plan: MemoryPlan) -> int:
    """All blocks, the norms before and behind them, and what joins two inputs."""
    config = plan.config
    join = linears_bytes(plan, config.mtp_inputs()[2:]) if config.is_mtp else 0
    blocks = sum(block_bytes(plan, layer) for layer in range(config.layers))
    return blocks + join + sum(_norm_bytes(plan, norm) for norm in config.norms())


def shadow_bytes(plan: MemoryPlan) -> int:
    """The packed linears of the blocks once more, dense; of those that share an input all or none."""
    if not plan.shadow:
        return 0
    groups = (group for layer in range(plan.config.layers) for group in plan.config.layer(layer).products().values())
    packed = (group for group in groups if all(spec.name in plan.packings for spec in group))
    return sum(spec.out_features * spec.in_features for group in packed for spec in group) * plan.value_bytes


def _norm_bytes(plan: MemoryPlan, norm: NormSpec) -> int:
    """A gain: in fp32 where it is not what is stored."""
    return norm.size * (4 if norm.fp32_gain else plan.value_bytes)


def head_bytes(plan: MemoryPlan) -> int:
    """The output projection [vocab, hidden], read whole for every token; with tied embeddings, the embedding itself."""
    head = plan.config.head()
    packing = plan.packings.get(head.name)
    if packing:
        return packing.bytes(head.out_features, head.in_features, plan.scale_bytes)
    return head.out_features * head.in_features * plan.value_bytes


def embedding_bytes(plan: MemoryPlan) -> int:
    """Embedding [vocab, hidden], dense, and the head beside it; when tied they are the same tensor.

    What all layers are told of tokens is here too: a table and a projection. A head that predicts has neither.
    """
    if plan.config.is_mtp:
        return 0
    table = plan.config.vocab_size * plan.config.hidden_size * plan.value_bytes
    told = plan.config.per_layer_linears()
    table += sum(linear.out_features * linear.in_features for linear in told) * plan.value_bytes
    return table if plan.config.tie_embeddings else table + head_bytes(plan)
