"""What a model really takes: load it, run the largest pass and decode, and hold the result against the estimate.

Weights and cache are counted by the storages of all live tensors, not by what the model says of itself; the rest by
the process's resident memory, or by torch's allocator on a GPU. Does not print, and does not know the model's origin.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.device.system import peak_resident, reset_peak, resident
from mycli.runtime.engine.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner, cache_shape
from mycli.runtime.errors import GateError
from mycli.runtime.memory.estimate import cache_positions, estimate, state_slots
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sample_rows import sample_rows
from mycli.runtime.sampling.sampler import Sampler

DECODED = 4  # tokens: the first may allocate what the others use again
TOUCHED = 256  # positions of the cache at a time


@dataclass(frozen=True)
class MemoryPart:
    """One line of the comparison, in bytes. `exact` parts and the total must agree both ways, others count in it."""

    name: str
    predicted: int
    actual: int
    exact: bool

    @property
    def error(self) -> float:
        return (self.actual - self.predicted) / self.predicted if self.predicted else float(self.actual > 0)

    def within(self, tolerance: float) -> bool:
        """Whether this part passes the gate."""
        return abs(self.error) <= tolerance or not (self.exact or self.name == "total")


def _storages(device: torch.device) -> dict[int, int]:
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), Tensor):  # isinstance would ask odd objects of torch for their class
            continue
        if thing.device.type == device.type:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def _new(before: dict[int, int], after: dict[int, int]) -> int:
    return sum(size for address, size in after.items() if before.get(address) != size)


class MemoryMeter:
    """Memory of the process, or on a GPU of torch's pool: what is held, and the most that was held since `begin`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None

    def begin(self) -> int:
        """What is held now; `highest` starts from here."""
        if self._cuda is None:
            reset_peak()
            return resident()
        torch.cuda.reset_peak_memory_stats(self._cuda)
        return torch.cuda.memory_allocated(self._cuda)

    def highest(self) -> int:
        """The most since `begin`."""
        return peak_resident() if self._cuda is None else torch.cuda.max_memory_allocated(self._cuda)

    def outside(self) -> int:
        """What the GPU misses beyond torch's pool: the context, libraries and kernels. Of main memory it is in both."""
        if self._cuda is None:
            return 0
        free, total = torch.cuda.mem_get_info(self._cuda)
        return total - free - torch.cuda.memory_reserved(self._cuda)


def _warm_up(device: torch.device, dtype: torch.dtype) -> None:
    square = torch.zeros(1, 1, 64, 64, device=device, dtype=dtype)
    functional.scaled_dot_product_attention(
        square, square @ square, functional.linear(square[0, 0], square[0, 0])[None, None]
    )


def _touch(cache: KVCache, runner: ModelRunner) -> None:
    config, size = runner.config, cache.block_size
    for slot in range(cache.states.slots):
        cache.states.clear(slot)
    for layer in range(config.layers):
        shape = min(TOUCHED, size), *config.kv_shape(layer)
        zeros = torch.zeros(shape, dtype=runner.dtype, device=runner.device)
        for block in range(cache.blocks):
            for start in range(0, size, TOUCHED):
                count = min(TOUCHED, size - start)
                batch = Batch.of([Chunk([0] * count, start, (block,), 0)], size, runner.device)
                cache.write(layer, batch, zeros[:count], zeros[:count])


def _run(runner: ModelRunner, cache: KVCache, context: int, tokens: int, sequences: int) -> None:
    needed = -(-context // cache.block_size)
    blocks = [
        tuple((first + one) % cache.blocks for one in range(needed)) for first in range(0, sequences * needed, needed)
    ]
    start = context - tokens - DECODED
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    samplers = [Sampler(sampling, runner.config.vocab_size, runner.device) for _ in range(sequences)]
    logits = runner.run([Chunk([0] * tokens, start, blocks[0], 1)], cache).expand(sequences, -1)
    for place in range(start + tokens, context):
        drawn = [token for token in sample_rows(logits, samplers) if isinstance(token, int)]
        chunks = [Chunk([drawn[one]], place, blocks[one], 1, one) for one in range(sequences)]
        logits = runner.run(chunks, cache)


def measure_memory(
    folder: ModelFolder, plan: MemoryPlan, placement: Placement, *, allow_nonfinite: bool = False
) -> list[MemoryPart]:
    """Load the model of `folder` as `plan` says, run it, and compare part by part. `plan.draft` is not loaded.

    The cache is filled with zeros up to the last chunk: what a pass takes does not depend on what it reads.
    """
    predicted, device, meter = estimate(plan), placement.device, MemoryMeter(placement.device)
    _warm_up(device, placement.dtype)
    empty = _storages(device)
    meter.begin()
    runner = load_model(folder, placement, allow_nonfinite=allow_nonfinite, expert_slots=plan.expert_slots)
    model = runner.model
    loaded = _storages(device)
    embeddings = model.embedding.nbytes + (0 if plan.config.tie_embeddings else model.head.nbytes)
    embeddings += 0 if model.per_layer is None else model.per_layer.nbytes
    capacity = cache_positions(plan.context)
    slots = state_slots(runner.config, plan.running or plan.batch)
    cache = runner.make_cache(cache_shape(capacity, plan.batch, plan.batch, device), slots)
    exact = [
        MemoryPart("weights", predicted.weights, _new(empty, loaded) - embeddings, exact=True),
        MemoryPart("embeddings and head", predicted.embeddings, embeddings, exact=True),
        MemoryPart("cache", predicted.cache, _new(loaded, _storages(device)), exact=True),
    ]
    _touch(cache, runner)
    loading = meter.highest()
    before = meter.begin()
    _run(runner, cache, capacity, min(plan.chunk, capacity - DECODED), plan.batch)
    running, outside = meter.highest(), meter.outside()
    runtime = before + outside - sum(part.actual for part in exact)
    return [
        MemoryPart("runtime", predicted.runtime, runtime, exact=False),
        *exact,
        MemoryPart("workspace", predicted.workspace.total, running - before, exact=False),
        MemoryPart("total", predicted.total, max(loading, running) + outside, exact=False),
    ]


def check_parts(parts: Sequence[MemoryPart], tolerance: float) -> None:
    """Raise GateError naming the parts that are off by more than `tolerance`, either way."""
    wrong = [part for part in parts if not part.within(tolerance)]
    if wrong:
        off = ", ".join(f"{part.name} {part.error:+.1%}" for part in wrong)
        raise GateError(
            f"the estimate is off by more than {100 * tolerance:g}%: {off}", "please report it, with this table"
        )
