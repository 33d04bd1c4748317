"""How much memory a model takes, what of it fits, and how fast it could decode at best: numbers in, numbers out.

One small function per part, each with its formula; the preflight of every load (`runtime.memory.fit`) runs the same.
Sizes are bytes; R is the rows of the largest pass, the tokens of a chunk of prompts. Knows shapes,
packings and the runtime's buffers. Does not import torch, read files, or ask the machine: free memory is an argument.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from mycli.runtime.memory.graphs import captured_rows, graph_bytes
from mycli.runtime.memory.layer import pass_values
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.weights import embedding_bytes, linears_bytes, shadow_bytes, weight_bytes
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.recurrent_spec import STATE_BYTES
from mycli.runtime.quantization.int4_vectors import FUSED_INT4_HEADS
from mycli.runtime.quantization.scheme import Packing

TABLE_PART = 1 << 24  # weights of a table that the CPU decodes at a time
CACHE_BLOCK = 16  # positions; the cache is rounded up to whole blocks
SHARED_BLOCK = 64  # positions of a block that sequences share: small enough to share, and a table is short
# What a process takes beside the model. CPU: Python, torch and its libraries, measured with torch 2.13 on Linux. CUDA:
# context, cuBLAS workspace (32 MiB on Hopper), loaded kernels: the usual size; `--verify` shows the real one.
CPU_RUNTIME = 252 << 20
CUDA_RUNTIME = 512 << 20
CPU_KEPT = 64 << 20  # at most, that glibc keeps of freed memory: twice its largest mmap threshold


@dataclass(frozen=True)
class Workspace:
    """What one pass needs beside weights and cache, in bytes: the parts that live at its peak."""

    activations: int
    dequantization: int
    cache: int
    logits: int
    mask: int
    rope: int
    kept: int
    graphs: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Estimate:
    """Predicted memory in bytes. `weights`: the blocks with scales, norms, biases; `draft`: a whole second model.

    `runtime` is the process itself: Python and torch on the CPU, the CUDA context on a GPU.
    """

    weights: int
    embeddings: int
    cache: int
    draft: int
    workspace: Workspace
    runtime: int

    @property
    def needed(self) -> int:
        """What a process that already runs torch must still allocate."""
        return self.weights + self.embeddings + self.cache + self.draft + self.workspace.total

    @property
    def total(self) -> int:
        """Everything, from a machine where nothing runs yet."""
        return self.needed + self.runtime


def rank_bytes(plan: MemoryPlan, ranks: int) -> int:
    """What each of `ranks` GPUs holds where a model is split by tensors: its share of weights, embeddings and cache.

    The buffers of a pass and the process are counted whole for each. Keys and values of a head are not split further.
    """
    whole = estimate(plan)
    shared = (whole.weights + whole.embeddings) // ranks + whole.cache // min(ranks, plan.config.kv_heads)
    return shared + whole.workspace.total + whole.runtime


def cache_positions(context: int) -> int:
    """`context` rounded up to whole blocks of the cache."""
    return -(-context // CACHE_BLOCK) * CACHE_BLOCK


def _held_positions(plan: MemoryPlan) -> int:
    """Of all sequences: several on a CPU share blocks."""
    positions = cache_positions(plan.context) * plan.batch
    return positions if plan.gpu or plan.batch == 1 else -(-positions // SHARED_BLOCK) * SHARED_BLOCK


def cache_bytes(plan: MemoryPlan) -> int:
    """Positions x batch x bytes of a token in every layer, and the states of recurrent layers.

    A sliding window does not make it smaller: the cache keeps every position.
    """
    token = sum(plan.token_bytes(layer) for layer in range(plan.config.layers))
    return _held_positions(plan) * token + all_state_bytes(plan)


def state_bytes(config: ModelConfig) -> int:
    """What recurrent layers keep of one sequence, whatever its length."""
    specs = (spec.recurrent for spec in config.layer_specs)
    return STATE_BYTES * sum(prod(shape) for spec in specs if spec is not None for shape in spec.state_shapes())


def state_slots(config: ModelConfig, running: int) -> int:
    """States held for so many sequences at once: one each, another each for texts that begin alike, and one more."""
    return 2 * running + 1 if config.has_recurrent else 0


def all_state_bytes(plan: MemoryPlan) -> int:
    """What recurrent layers keep of all sequences, and of texts that begin alike."""
    return state_slots(plan.config, plan.running or plan.batch) * state_bytes(plan.config)


def activation_bytes(plan: MemoryPlan) -> int:
    """R rows of what a pass keeps alive in a layer (`memory.layer.pass_values`), and of what layers are told."""
    told = plan.config.layers * plan.config.per_layer_width
    return plan.rows * (max(map(pass_values, plan.config.layer_specs)) + told) * plan.value_bytes


def dequantization_bytes(plan: MemoryPlan) -> int:
    """The largest packed product of a block as a dense matrix: a GPU multiplies many rows that way. 0 if all dense.

    The CPU multiplies packed weights as they are; of tables whose values are no integers it decodes at most
    `TABLE_PART` weights at a time. A shadow leaves nothing to unpack.
    """
    tables = any(packing.codes not in ("int", "e2m1") for packing in plan.packings.values())
    if plan.shadow or not (plan.gpu or tables):
        return 0
    largest = 0
    for layer in range(plan.config.layers):
        for group in plan.config.layer(layer).products().values():
            packed = [spec for spec in group if spec.name in plan.packings]
            largest = max(largest, sum(spec.out_features * spec.in_features for spec in packed))
    return (largest if plan.gpu else min(largest, TABLE_PART)) * plan.value_bytes


def dense_cache_bytes(plan: MemoryPlan) -> int:
    """Keys and values of one layer and sequence: what a prompt's attention makes of another kind, or of blocks."""
    as_they_lie = plan.kv == "auto" or (plan.kv == "bf16" and plan.value_bytes == 2)
    if as_they_lie and (plan.gpu or plan.batch == 1):
        return 0
    largest = max(heads * head_dim for heads, head_dim in map(plan.config.kv_shape, range(plan.config.layers)))
    return 2 * largest * cache_positions(plan.context) * plan.value_bytes


def logits_bytes(plan: MemoryPlan) -> int:
    """Last token only: batch x vocab logits, as computed and in fp32, and four fp32-sized copies while drawing."""
    return plan.batch * plan.config.vocab_size * (plan.value_bytes + 5 * 4)


def mask_bytes(plan: MemoryPlan) -> int:
    """Who sees whom, for a chunk that is not the first: chunk x context, a bool and its copy in the dtype of values.

    One for each kind of window. Capped scores are written out too, and thrice: in fp32, of the query heads of one key
    head.
    """
    config = plan.config
    capped = [spec for spec in config.attentions if spec.softcap is not None]
    scores = 3 * 4 * max((spec.heads // spec.kv_heads for spec in capped), default=0)
    if plan.context == plan.chunk:
        return plan.chunk * plan.context * scores
    return plan.chunk * plan.context * (len(config.distinct_windows) + plan.value_bytes + scores)


def rope_bytes(plan: MemoryPlan) -> int:
    """Cosines and sines, for each kind of rotation: 2 x context x dim / 2 values."""
    return sum(plan.context * rope.dim * plan.value_bytes for rope in plan.config.distinct_ropes)


def kept_bytes(plan: MemoryPlan) -> int:
    """What the C library keeps of activations that were freed, in pieces: as much again as lives, up to `CPU_KEPT`.

    On a GPU torch's pool keeps what it has, and gives it to the next pass.
    """
    return 0 if plan.gpu else min(activation_bytes(plan), CPU_KEPT)


def captured_bytes(plan: MemoryPlan) -> int:
    """What captured passes hold where fused kernels may do them: on a GPU, all blocks packed, heads that they read.

    Counted also for a layer that they turn out not to do.
    """
    specs = plan.config.layer_specs
    names = (one.name for spec in specs for linears in spec.products().values() for one in linears)
    unread = plan.kv == "int4" and plan.config.head_dim not in FUSED_INT4_HEADS
    if not plan.gpu or unread or any(plan.packings.get(name) is None for name in names):
        return 0
    rows = captured_rows(plan.running or plan.batch, plan.draft is not None)
    values = max(map(pass_values, specs))
    sizes = (size for spec in specs for size in _multiplied_bytes(plan, spec, max(rows)))
    return graph_bytes(rows, plan.config.vocab_size * plan.value_bytes, values * plan.value_bytes, sizes)


def _multiplied_bytes(plan: MemoryPlan, spec: LayerSpec, rows: int) -> Iterator[int]:
    """Of the weights of each launch of a layer: of a product, or of all experts that so many rows may go to."""
    hit = min(len(spec.mlp.experts), rows * spec.mlp.top_k) if isinstance(spec.mlp, ExpertsSpec) else 0
    for name, linears in spec.products().items():
        yield linears_bytes(plan, linears) * (hit if name.startswith("experts.") else 1)


@dataclass(frozen=True)
class _Fixed:
    """What no context changes, in bytes: counted once for all that are tried. `draft`: its weights."""

    weights: int
    embeddings: int
    draft: int
    dequantization: int
    graphs: int


def _held(plan: MemoryPlan) -> MemoryPlan:
    """With packings as the device holds them."""
    if not plan.gpu:
        return plan
    return replace(plan, packings={name: _on_gpu(packing) for name, packing in plan.packings.items()})


def _on_gpu(packing: Packing) -> Packing:
    return packing.on_gpu() or replace(packing, super_blocks=False)  # unpacked for each pass: as it is read


def _fixed(plan: MemoryPlan) -> _Fixed:
    return _Fixed(
        weights=weight_bytes(plan) + shadow_bytes(plan),
        embeddings=embedding_bytes(plan),
        draft=0 if plan.draft is None else weight_bytes(plan.draft) + embedding_bytes(plan.draft),
        dequantization=dequantization_bytes(plan),
        graphs=captured_bytes(plan),
    )


def _whole(plan: MemoryPlan, fixed: _Fixed) -> Estimate:
    draft = fixed.draft
    if plan.draft is not None:
        draft += cache_bytes(replace(plan.draft, context=plan.context, batch=plan.batch))
    workspace = Workspace(
        activations=activation_bytes(plan),
        dequantization=fixed.dequantization,
        cache=dense_cache_bytes(plan),
        logits=logits_bytes(plan),
        mask=mask_bytes(plan),
        rope=rope_bytes(plan),
        kept=kept_bytes(plan),
        graphs=fixed.graphs,
    )
    runtime = CUDA_RUNTIME if plan.gpu else CPU_RUNTIME
    return Estimate(fixed.weights, fixed.embeddings, cache_bytes(plan), draft, workspace, runtime)


def estimate(plan: MemoryPlan) -> Estimate:
    """Every part of `plan`. A draft model shares the context and the workspace, which the larger model dominates."""
    plan = _held(plan)
    return _whole(plan, _fixed(plan))


def longest_context(plan: MemoryPlan, free: int, started: bool = False) -> int:
    """The longest context, at most the model's, that fits into `free` bytes; 0 where not one block does.

    `started`: the process runs already, so what it takes itself is no longer in `free`.
    """

    plan = _held(plan)
    fixed = _fixed(plan)

    def fits(context: int) -> bool:
        result = _whole(replace(plan, context=context), fixed)
        return (result.needed if started else result.total) <= free

    low, high = 0, plan.config.max_context  # every part grows with the context, so bisect
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low if low == plan.config.max_context else low // CACHE_BLOCK * CACHE_BLOCK
