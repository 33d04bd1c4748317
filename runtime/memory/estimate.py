"""Predicts the memory of a model from its plan, in bytes, and the longest context that fits.

One small function per part. The preflight of every load uses the same numbers; free memory is an argument.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.memory.graphs import MOST_ROWS, PROMPT_ROWS, decode_shapes, draft_rows, graph_bytes
from mycli.runtime.memory.plan import CACHE_BLOCK, MemoryPlan, cache_positions
from mycli.runtime.memory.weights import (
    embedding_bytes,
    is_copied,
    linears_bytes,
    prompt_copy_bytes,
    weight_bytes,
)
from mycli.runtime.memory.workspace import dense_cache_bytes, mask_bytes, pass_values
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.recurrent_spec import STATE_BYTES
from mycli.runtime.quantization.int4_vectors import FUSED_INT4_HEADS
from mycli.runtime.quantization.scheme import INTEGER_TABLES, Packing, stacked_packing
from mycli.runtime.utils.dtypes import FP8_PIECE

TABLE_PART = 1 << 24  # codebook weights that the CPU decodes at a time
# A process without a model. CPU: Python, torch and its libraries, measured with torch 2.13 on Linux. CUDA: context,
# cuBLAS workspace (32 MiB on Hopper) and loaded kernels, as `diagnostics.memory_check` measured on an H200.
CPU_RUNTIME = 252 << 20
CUDA_RUNTIME = 832 << 20
CPU_KEPT = 64 << 20  # most freed memory that glibc does not return: twice its largest mmap threshold


@dataclass(frozen=True)
class Workspace:
    """Bytes that a pass needs at its peak in addition to weights and cache."""

    activations: int
    dequantization: int
    cache: int
    logits: int
    mask: int
    rope: int
    allocator: int
    graphs: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Estimate:
    """Predicted bytes. `needed`: what a process that has loaded torch still allocates."""

    weights: int  # of the blocks
    embeddings: int
    cache: int
    draft: int  # weights and cache of the draft model
    workspace: Workspace
    runtime: int  # Python and torch, or the CUDA context

    @property
    def needed(self) -> int:
        return self.weights + self.embeddings + self.cache + self.draft + self.workspace.total

    @property
    def total(self) -> int:
        return self.needed + self.runtime


def rank_bytes(plan: MemoryPlan, ranks: int) -> int:
    """Return the bytes on each of `ranks` GPUs with tensor parallelism."""
    # Buffers of a pass and the process are counted whole for each; a KV head is not split.
    whole = estimate(plan)
    shared = _rank_share(whole, plan, ranks)
    if plan.draft is not None:  # vLLM and SGLang split a draft as they split the model
        draft = replace(plan.draft, context=plan.context, batch=plan.batch)
        shared += _rank_share(estimate(draft), draft, ranks)
    return shared + whole.workspace.total + whole.runtime


def _rank_share(parts: Estimate, plan: MemoryPlan, ranks: int) -> int:
    return (parts.weights + parts.embeddings) // ranks + parts.cache // min(ranks, plan.config.kv_heads)


def _cache_shape(plan: MemoryPlan) -> CacheShape:
    return replace(plan, context=cache_positions(plan.context)).cache_shape


def cache_bytes(plan: MemoryPlan, shape: CacheShape | None = None) -> int:
    config, shape = plan.config, shape or _cache_shape(plan)
    tokens = (shape.blocks_of(config.windowed(layer)) * plan.token_bytes(layer) for layer in range(config.layers))
    return shape.block_size * sum(tokens) + all_state_bytes(plan)


def state_bytes(config: ModelConfig) -> int:
    specs = (spec.recurrent for spec in config.layer_specs)
    return STATE_BYTES * sum(prod(shape) for spec in specs if spec is not None for shape in spec.state_shapes())


def state_slots(config: ModelConfig, running: int) -> int:
    """Return the number of recurrent states: per running sequence one and one for prefix reuse, and one spare."""
    return 2 * running + 1 if config.has_recurrent else 0


def all_state_bytes(plan: MemoryPlan) -> int:
    return state_slots(plan.config, plan.running or plan.batch) * state_bytes(plan.config)


def activation_bytes(plan: MemoryPlan) -> int:
    # Of the largest pass: those of one layer, and the per-layer inputs.
    per_layer = plan.config.layers * plan.config.per_layer_width
    return plan.rows * (max(map(pass_values, plan.config.layer_specs)) + per_layer) * plan.value_bytes


def dequantization_bytes(plan: MemoryPlan) -> int:
    # A GPU unpacks the largest product to multiply many rows.
    # The CPU multiplies packed integers directly; non-integer codebooks it decodes in parts of `TABLE_PART` weights.
    tables = any(packing.codes not in ("int", "e2m1", *INTEGER_TABLES) for packing in plan.packings.values())
    if not (plan.gpu or tables):
        return 0
    largest = codes = 0
    for layer in range(plan.config.layers):
        for group in plan.config.layer(layer).products().values():
            if is_copied(plan, group):
                codes = max(codes, plan.rows * group[0].in_features)
                continue
            packed = [spec for spec in group if spec.name in plan.packings]
            largest = max(largest, sum(spec.out_features * spec.in_features for spec in packed))
    if plan.prompt_copy == "fp8":  # rows in 8 bits, and some in fp32
        return max(largest * plan.value_bytes, codes + 2 * 4 * min(codes, FP8_PIECE))
    return (largest if plan.gpu else min(largest, TABLE_PART)) * plan.value_bytes


def logits_bytes(plan: MemoryPlan) -> int:
    # Of the last token of each sequence: as computed, in fp32, and four fp32 copies while sampling.
    return (plan.running or plan.batch) * plan.config.vocab_size * (plan.value_bytes + 5 * 4)


def rope_bytes(plan: MemoryPlan) -> int:
    # Cosines and sines [context, dim / 2] for each distinct rotation.
    return sum(plan.context * rope.dim * plan.value_bytes for rope in plan.config.distinct_ropes)


def allocator_bytes(plan: MemoryPlan) -> int:
    # Freed activations that the C library does not return to the system.
    # On a GPU torch's allocator reuses them for the next pass.
    return 0 if plan.gpu else min(activation_bytes(plan), CPU_KEPT)


def captured_bytes(plan: MemoryPlan) -> int:
    """Return the bytes of captured passes, which a GPU has."""
    # An upper bound: also counted for a model whose passes turn out to be declined.
    specs = plan.config.layer_specs
    latent = any(spec.latent is not None for spec in specs)
    unread = plan.kv == "int4" and (latent or plan.config.head_dim not in FUSED_INT4_HEADS)
    if not plan.gpu or unread:
        return 0
    running, drafted = plan.running or plan.batch, plan.drafts_without_model or plan.draft is not None
    rows = [sequences * new for sequences, new in decode_shapes(running, drafted)]
    values = max(map(pass_values, specs))
    sizes = (size for spec in specs for size in _multiplied_bytes(plan, spec))
    logits, read = plan.config.vocab_size * plan.value_bytes, plan.draft is not None and plan.draft.config.is_mtp
    longest = min(plan.rows, MOST_ROWS if read else PROMPT_ROWS)
    hidden = plan.config.hidden_size * plan.value_bytes if read else 0
    graphs = graph_bytes(rows, logits, values * plan.value_bytes, sizes, longest, hidden)
    if not drafted:
        return graphs
    # Recurrent states advance by accepted tokens only: until their number is known, the rows of all are kept.
    row = sum(spec.recurrent.draft_values() for spec in specs if spec.recurrent is not None)
    return graphs + draft_rows(running) * row * plan.value_bytes


def _multiplied_bytes(plan: MemoryPlan, spec: LayerSpec) -> Iterator[int]:
    # One size per launch: all experts that the rows of a pass may choose are multiplied in one.
    hit = min(len(spec.mlp.experts), MOST_ROWS * spec.mlp.top_k) if isinstance(spec.mlp, ExpertsSpec) else 0
    # Without packed weights there is no fused pass, and only the products of experts have partial sums.
    for name, linears in spec.products().items():
        if (routed := name.startswith("experts.")) or plan.packings:
            yield linears_bytes(plan, linears) * (hit if routed else 1)


@dataclass(frozen=True)
class _Fixed:
    # Does not depend on the context: computed once for all that `longest_context` tries.
    weights: int
    embeddings: int
    draft: int
    dequantization: int
    graphs: int


def as_on_device(plan: MemoryPlan) -> MemoryPlan:
    """Return the plan with the packings in which a GPU stores its weights; others are as they are."""
    if not plan.gpu:
        return plan
    packings = dict(plan.packings)
    for spec in plan.config.layer_specs:
        linears = spec.products().get("qkv", ())
        stacked = stacked_packing([packings.get(linear.name) for linear in linears]) if linears else None
        if stacked is not None:
            packings |= {linear.name: stacked for linear in linears}
    draft = None if plan.draft is None else as_on_device(replace(plan.draft, gpu=True))
    return replace(plan, packings={name: _on_gpu(packing) for name, packing in packings.items()}, draft=draft)


def _on_gpu(packing: Packing) -> Packing:
    return packing.on_gpu() or replace(packing, byte_scales=None)  # without a kernel: as stored, unpacked each pass


def _fixed(plan: MemoryPlan) -> _Fixed:
    return _Fixed(
        weights=weight_bytes(plan) + prompt_copy_bytes(plan),
        embeddings=embedding_bytes(plan),
        draft=0 if plan.draft is None else weight_bytes(plan.draft) + embedding_bytes(plan.draft),
        dequantization=dequantization_bytes(plan),
        graphs=captured_bytes(plan),
    )


def _whole(plan: MemoryPlan, fixed: _Fixed) -> Estimate:
    draft, shape = fixed.draft, _cache_shape(plan)
    if plan.draft is not None:
        # Its cache has the blocks of the target, and stores every position.
        draft += cache_bytes(replace(plan.draft, context=plan.context, batch=plan.batch), shape.without_windows())
    workspace = Workspace(
        activations=activation_bytes(plan),
        dequantization=fixed.dequantization,
        cache=dense_cache_bytes(plan),
        logits=logits_bytes(plan),
        mask=mask_bytes(plan),
        rope=rope_bytes(plan),
        allocator=allocator_bytes(plan),
        graphs=fixed.graphs,
    )
    runtime = CUDA_RUNTIME if plan.gpu else CPU_RUNTIME
    return Estimate(fixed.weights, fixed.embeddings, cache_bytes(plan, shape), draft, workspace, runtime)


def estimate(plan: MemoryPlan) -> Estimate:
    # A draft model has the same context and shares the workspace, which is sized by the larger model.
    plan = as_on_device(plan)
    return _whole(plan, _fixed(plan))


def longest_context(plan: MemoryPlan, free: int, started: bool = False) -> int:
    """Return the longest context, at most the model's, that fits `free` bytes; 0 if not one block fits.

    `started`: torch is loaded, so `free` no longer includes what the process itself takes.
    """
    plan = as_on_device(plan)
    fixed = _fixed(plan)

    def fits(context: int) -> bool:
        result = _whole(replace(plan, context=context), fixed)
        return (result.needed if started else result.total) <= free

    low, high = 0, plan.config.max_context  # every part grows with the context: bisect
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low if low == plan.config.max_context else low // CACHE_BLOCK * CACHE_BLOCK
