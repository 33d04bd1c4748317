"""How much memory a model takes, what of it fits, and how fast it could decode at best: numbers in, numbers out.

One small function per part, each with its formula; the preflight of every load (`runtime.memory.fit`) runs the same.
Sizes are bytes; R is the rows of the largest pass, the tokens of a chunk of prompts. Knows shapes,
packings and the runtime's buffers. Does not import torch, read files, or ask the machine: free memory is an argument.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from mycli.runtime.memory.graphs import captured_rows, graph_bytes
from mycli.runtime.memory.layer import pass_values
from mycli.runtime.models.config import Kv, ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, NormSpec
from mycli.runtime.models.recurrent_spec import STATE_BYTES
from mycli.runtime.quantization.int4_vectors import int4_bytes
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import BY_NAME, Dtype

SCALE_BYTES = 4  # of an int8 cache: one fp32 per vector
TABLE_PART = 1 << 24  # weights of a table that the CPU decodes at a time
CACHE_BLOCK = 16  # positions; the cache is rounded up to whole blocks
SHARED_BLOCK = 64  # positions of a block that sequences share: small enough to share, and a table is short
DEFAULT_CONTEXT = 8192
# What a process takes beside the model. CPU: Python, torch and its libraries, measured with torch 2.13 on Linux. CUDA:
# context, cuBLAS workspace (32 MiB on Hopper), loaded kernels: the usual size; `--verify` shows the real one.
CPU_RUNTIME = 252 << 20
CUDA_RUNTIME = 512 << 20
CPU_KEPT = 64 << 20  # at most, that glibc keeps of freed memory: twice its largest mmap threshold


@dataclass(frozen=True)
class MemoryPlan:
    """What is to be run. `dtype` is of activations and dense weights; None: as in config.json. `kv`: of the cache.

    `shadow`: packed weights of the blocks are also kept in `dtype`. `running`: sequences at once, which share the room
    of `batch` whole ones; None for as many as those. `expert_slots`: experts of each layer that are in memory at a
    time, the others being read when they are chosen; None for all.
    """

    config: ModelConfig
    packings: Mapping[str, Packing] = field(default_factory=dict)
    context: int = DEFAULT_CONTEXT
    batch: int = 1
    dtype: Dtype | None = None
    gpu: bool = False
    draft: "MemoryPlan | None" = None
    kv: Kv = "auto"
    shadow: bool = False
    running: int | None = None
    expert_slots: int | None = None

    @property
    def value_bytes(self) -> int:
        """Bytes of one activation or dense weight."""
        return BY_NAME[self.dtype or self.config.dtype].nbytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale of packed weights: as stored, in any dtype of activations."""
        return BY_NAME[self.config.dtype].nbytes

    def token_bytes(self, layer: int) -> int:
        """Bytes of one token in the cache of a layer: 2 (keys, values) x heads x head_dim values, or codes and a scale
        of 4 for each head, or codes of half a byte and a scale of 2 for every 32 of a head."""
        heads, head_dim = self.config.cached(layer)
        if self.kv == "int4":
            return 2 * heads * int4_bytes(head_dim)
        size = {"auto": self.value_bytes, "bf16": 2, "int8": 1}[self.kv]
        return 2 * heads * (head_dim * size + (SCALE_BYTES if self.kv == "int8" else 0))

    @property
    def rows(self) -> int:
        """R: rows of the largest pass."""
        return max(self.chunk, self.batch)

    @property
    def chunk(self) -> int:
        """Tokens of prompts in a pass."""
        return min(self.context, prefill_chunk(self.gpu))


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
    join = linears_bytes(plan, config.joining()[2:]) if config.joins else 0
    blocks = sum(block_bytes(plan, layer) for layer in range(config.layers))
    return blocks + join + sum(_norm_bytes(plan, norm) for norm in config.norms())


def rank_bytes(plan: MemoryPlan, ranks: int) -> int:
    """What each of `ranks` GPUs holds where a model is split by tensors: its share of weights, embeddings and cache.

    The buffers of a pass and the process are counted whole for each. Keys and values of a head are not split further.
    """
    whole = estimate(plan)
    shared = (whole.weights + whole.embeddings) // ranks + whole.cache // min(ranks, plan.config.kv_heads)
    return shared + whole.workspace.total + whole.runtime


def shadow_bytes(plan: MemoryPlan) -> int:
    """The packed linears of the blocks once more, dense; of those that share an input all or none."""
    if not plan.shadow:
        return 0
    groups = (group for layer in range(plan.config.layers) for group in plan.config.block_linears(layer).values())
    packed = (group for group in groups if all(spec.name in plan.packings for spec in group))
    return sum(spec.out_features * spec.in_features for group in packed for spec in group) * plan.value_bytes


def _norm_bytes(plan: MemoryPlan, norm: NormSpec) -> int:
    """A gain: in fp32 where it is not what is stored."""
    return norm.size * (4 if norm.exact else plan.value_bytes)


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
    if plan.config.joins:
        return 0
    table = plan.config.vocab_size * plan.config.hidden_size * plan.value_bytes
    told = plan.config.per_layer_linears()
    table += sum(linear.out_features * linear.in_features for linear in told) * plan.value_bytes
    return table if plan.config.tie_embeddings else table + head_bytes(plan)


def prefill_chunk(gpu: bool) -> int:
    """Tokens of a prompt that go through the model at once: bounds the activations, and Ctrl-C is heard between two.

    A GPU unpacks every weight for each chunk: 2.5 bytes to move beside 2 x chunk operations, a ninth of them on an H200
    at 2048.
    """
    return 2048 if gpu else 512


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
    return STATE_BYTES * sum(prod(shape) for spec in specs if spec is not None for shape in spec.states())


def state_slots(config: ModelConfig, running: int) -> int:
    """States held for so many sequences at once: one each, another each for texts that begin alike, and one more."""
    return 2 * running + 1 if config.recurrent else 0


def all_state_bytes(plan: MemoryPlan) -> int:
    """What recurrent layers keep of all sequences, and of texts that begin alike."""
    return state_slots(plan.config, plan.running or plan.batch) * state_bytes(plan.config)


def activation_bytes(plan: MemoryPlan) -> int:
    """R rows of what a pass keeps alive in a layer (`memory.layer.pass_values`), and of what layers are told."""
    told = plan.config.layers * plan.config.per_layer_width
    return plan.rows * (max(map(pass_values, plan.config.layer_specs)) + told) * plan.value_bytes


def dequantization_bytes(plan: MemoryPlan) -> int:
    """The largest packed product of a block as a dense matrix: a GPU multiplies many rows that way. 0 if all dense.

    The CPU multiplies packed weights as they are; of tables it decodes at most `TABLE_PART` weights at a time. A shadow
    leaves nothing to unpack.
    """
    tables = any(packing.codes != "int" for packing in plan.packings.values())
    if plan.shadow or not (plan.gpu or tables):
        return 0
    largest = 0
    for layer in range(plan.config.layers):
        for group in plan.config.block_linears(layer).values():
            packed = [spec for spec in group if spec.name in plan.packings]
            largest = max(largest, sum(spec.out_features * spec.in_features for spec in packed))
    return (largest if plan.gpu else min(largest, TABLE_PART)) * plan.value_bytes


def dense_cache_bytes(plan: MemoryPlan) -> int:
    """Keys and values of one layer and sequence: what a prompt's attention makes of another kind, or of blocks."""
    as_they_lie = plan.kv == "auto" or (plan.kv == "bf16" and plan.value_bytes == 2)
    if as_they_lie and (plan.gpu or plan.batch == 1):
        return 0
    largest = max(heads * head_dim for heads, head_dim in map(plan.config.cached, range(plan.config.layers)))
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
    return sum(plan.context * rope.dim * plan.value_bytes for rope in plan.config.distinct_rotations)


def kept_bytes(plan: MemoryPlan) -> int:
    """What the C library keeps of activations that were freed, in pieces: as much again as lives, up to `CPU_KEPT`.

    On a GPU torch's pool keeps what it has, and gives it to the next pass.
    """
    return 0 if plan.gpu else min(activation_bytes(plan), CPU_KEPT)


def captured_bytes(plan: MemoryPlan) -> int:
    """What captured passes hold where fused kernels may do them: on a GPU, all blocks packed, the cache not in int4.

    Counted also for a layer that they turn out not to do.
    """
    linears = [each for layer in range(plan.config.layers) for each in plan.config.block_linears(layer).values()]
    packed = [[plan.packings.get(spec.name) for spec in group] for group in linears]
    if not plan.gpu or plan.kv == "int4" or any(one is None for group in packed for one in group):
        return 0
    rows = captured_rows(plan.running or plan.batch, plan.draft is not None)
    values = max(map(pass_values, plan.config.layer_specs))
    sizes = (linears_bytes(plan, group) for group in linears)
    return graph_bytes(rows, plan.config.vocab_size * plan.value_bytes, values * plan.value_bytes, sizes)


def estimate(plan: MemoryPlan) -> Estimate:
    """Every part of `plan`. A draft model shares the context and the workspace, which the larger model dominates."""
    if plan.gpu:
        held = {name: packing.on_gpu() or packing for name, packing in plan.packings.items()}
        plan = replace(plan, packings=held)
    draft = 0
    if plan.draft is not None:
        second = replace(plan.draft, context=plan.context, batch=plan.batch)
        draft = weight_bytes(second) + embedding_bytes(second) + cache_bytes(second)
    workspace = Workspace(
        activations=activation_bytes(plan),
        dequantization=dequantization_bytes(plan),
        cache=dense_cache_bytes(plan),
        logits=logits_bytes(plan),
        mask=mask_bytes(plan),
        rope=rope_bytes(plan),
        kept=kept_bytes(plan),
        graphs=captured_bytes(plan),
    )
    runtime = CUDA_RUNTIME if plan.gpu else CPU_RUNTIME
    weights = weight_bytes(plan) + shadow_bytes(plan)
    return Estimate(weights, embedding_bytes(plan), cache_bytes(plan), draft, workspace, runtime)


def longest_context(plan: MemoryPlan, free: int, started: bool = False) -> int:
    """The longest context, at most the model's, that fits into `free` bytes; 0 where not one block does.

    `started`: the process runs already, so what it takes itself is no longer in `free`.
    """

    def fits(context: int) -> bool:
        result = estimate(replace(plan, context=context))
        return (result.needed if started else result.total) <= free

    low, high = 0, plan.config.max_context  # every part grows with the context, so bisect
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low if low == plan.config.max_context else low // CACHE_BLOCK * CACHE_BLOCK
