"""Bytes of weights: blocks, embeddings and head, and copies of packed weights for prompts."""

from collections.abc import Iterable, Sequence
from math import prod

from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, NormSpec
from mycli.runtime.models.recurrent_spec import STATE_BYTES
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import has_prompt_copy

_CPU_ROWS = 16  # the rows of a block of packed weights in native code


def _packed_bytes(plan: MemoryPlan, packing: Packing, rows: int, columns: int) -> int:
    # A product of several linears pads their rows together: with each padded alone the estimate is a little larger.
    padded = rows if plan.gpu else -(-rows // _CPU_ROWS) * _CPU_ROWS
    return packing.bytes(padded, columns, plan.scale_bytes)


def block_bytes(plan: MemoryPlan, layer: int) -> int:
    """Return the bytes of one block: linears, norms and biases; without experts that stay on disk."""
    size, total = plan.value_bytes, 0
    for name, shape in plan.config.layer(layer).tensors():
        packing = plan.packings.get(name.removesuffix(".weight"))
        total += _packed_bytes(plan, packing, *shape) if packing else prod(shape) * size
    spec = plan.config.layer(layer)
    if spec.recurrent is not None:
        total += sum(prod(shape) for _, shape in spec.recurrent.tensors()) * (STATE_BYTES - size)  # stored in fp32
    if spec.latent is not None and (packing := plan.packings.get(spec.latent.kv_b.name)):
        # Decoded at load: decoding multiplies it in both directions, head by head.
        rows, columns = spec.latent.kv_b.out_features, spec.latent.kv_b.in_features
        total += rows * columns * size - _packed_bytes(plan, packing, rows, columns)
    norms = (norm for part in spec.parts for norm in (part.norm, part.output_norm, *part.inner_norms()))
    total += sum(_norm_bytes(plan, norm) for norm in norms if norm is not None and norm.name is None)  # constant gains
    total -= _absent_bytes(plan, spec)
    return total + sum(_norm_bytes(plan, norm) - norm.elements * size for norm in spec.norms())


def _absent_bytes(plan: MemoryPlan, spec: LayerSpec) -> int:
    if plan.expert_slots is None or not isinstance(spec.mlp, ExpertsSpec):
        return 0
    # Any expert may be in a slot, so the smallest are counted as absent.
    sizes = sorted(linears_bytes(plan, expert.linears) for expert in spec.mlp.experts)
    return sum(sizes[: max(0, len(sizes) - plan.expert_slots)])


def linears_bytes(plan: MemoryPlan, linears: Iterable[LinearSpec]) -> int:
    total, size = 0, plan.value_bytes
    for spec in linears:
        packing, dense = plan.packings.get(spec.name), spec.out_features * spec.in_features * size
        total += _packed_bytes(plan, packing, spec.out_features, spec.in_features) if packing else dense
        total += spec.out_features * size * spec.bias
    return total


def weight_bytes(plan: MemoryPlan) -> int:
    """Return the bytes of all blocks, the norms around them, an adapter, and an MTP head's input projection."""
    config = plan.config
    inputs = linears_bytes(plan, config.mtp_inputs()[2:]) if config.is_mtp else 0
    blocks = sum(block_bytes(plan, layer) for layer in range(config.layers))
    adapter = plan.adapter_values * plan.value_bytes
    return blocks + inputs + adapter + sum(_norm_bytes(plan, norm) for norm in config.norms())


def is_copied(plan: MemoryPlan, group: Sequence[LinearSpec]) -> bool:
    """Return whether the linears `group`, which share an input, are also stored for prompts."""
    outputs = sum(spec.out_features for spec in group)
    packed = all(spec.name in plan.packings for spec in group)
    return packed and has_prompt_copy(plan.prompt_copy, outputs, group[0].in_features)


def prompt_copy_bytes(plan: MemoryPlan) -> int:
    groups = (group for layer in range(plan.config.layers) for group in plan.config.layer(layer).products().values())
    copied = [spec for group in groups if is_copied(plan, group) for spec in group]
    if plan.prompt_copy == "fp8":
        return sum(spec.out_features * (spec.in_features + 4) for spec in copied)  # an fp32 scale per output
    return sum(spec.out_features * spec.in_features for spec in copied) * plan.value_bytes


def _norm_bytes(plan: MemoryPlan, norm: NormSpec) -> int:
    return norm.elements * (4 if norm.fp32_gain else plan.value_bytes)


def head_bytes(plan: MemoryPlan) -> int:
    head = plan.config.head()
    packing = plan.packings.get(head.name)
    bias = head.out_features * head.bias * plan.value_bytes
    if packing:
        return bias + _packed_bytes(plan, packing, head.out_features, head.in_features)
    return bias + head.out_features * head.in_features * plan.value_bytes


def embedding_bytes(plan: MemoryPlan) -> int:
    """Return the bytes of the embedding [vocab, hidden], the head, per-layer inputs and streams."""
    if plan.config.is_mtp:  # shares those of the model
        return 0
    table = plan.config.vocab_size * plan.config.hidden_size * plan.value_bytes
    dense = (*plan.config.per_layer_linears()[:1], *plan.config.dense_linears())
    table += sum(linear.out_features * linear.in_features for linear in dense) * plan.value_bytes
    return table if plan.config.tie_embeddings else table + head_bytes(plan)
