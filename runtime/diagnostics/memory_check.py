"""Measures the memory of a model and compares it with the estimate: load, run the largest pass, decode.

Weights and cache are summed over the storages of all live tensors, the rest is the process's resident memory or, on a
GPU, torch's allocator.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.kv_cache import KVCache, Stored
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.device.system import peak_resident, reset_peak, resident
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.errors import GateError
from mycli.runtime.memory.estimate import estimate, state_slots
from mycli.runtime.memory.plan import MemoryPlan, cache_positions
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler, sample_rows

DECODED = 4  # tokens: the first may allocate buffers that the others reuse
TOUCHED = 256  # cache positions written at a time


@dataclass(frozen=True)
class MemoryPart:
    """One row of the comparison, in bytes. Only `exact` parts and the total must be within the tolerance."""

    name: str
    predicted: int
    actual: int
    exact: bool

    @property
    def error(self) -> float:
        return (self.actual - self.predicted) / self.predicted if self.predicted else float(self.actual > 0)

    def within(self, tolerance: float) -> bool:
        """Return whether this part passes the check."""
        return abs(self.error) <= tolerance or not (self.exact or self.name == "total")


def _storages(device: torch.device) -> dict[int, int]:
    # Address -> bytes.
    gc.collect()
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        # not isinstance: it evaluates __class__, which some lazy objects of torch answer with an import
        if issubclass(type(item), Tensor) and item.device.type == device.type:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return storages


def _new(before: dict[int, int], after: dict[int, int]) -> int:
    return sum(size for address, size in after.items() if before.get(address) != size)


class MemoryMeter:
    """Measures the memory of the process, or on a GPU of torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None

    def begin(self) -> int:
        """Return the current memory, and reset the peak."""
        if self._cuda is None:
            reset_peak()
            return resident()
        torch.cuda.reset_peak_memory_stats(self._cuda)
        return torch.cuda.memory_allocated(self._cuda)

    def highest(self) -> int:
        """Return the peak since `begin`."""
        return peak_resident() if self._cuda is None else torch.cuda.max_memory_allocated(self._cuda)

    def outside(self) -> int:
        """Return the GPU memory used outside torch's allocator: CUDA context, libraries and kernels."""
        if self._cuda is None:  # resident memory includes everything
            return 0
        free, total = torch.cuda.mem_get_info(self._cuda)
        return total - free - torch.cuda.memory_reserved(self._cuda)


def _warm_up(device: torch.device, dtype: torch.dtype) -> None:
    # Creates the CUDA context and loads the libraries of the first product and attention.
    square = torch.zeros(1, 1, 64, 64, device=device, dtype=dtype)
    functional.scaled_dot_product_attention(
        square, square @ square, functional.linear(square[0, 0], square[0, 0])[None, None]
    )


def _touch(cache: KVCache, runner: ModelRunner) -> None:
    # Writes every page of the cache, so that none is counted as workspace later; in small parts, to allocate little.
    config, size = runner.config, cache.block_size
    for slot in range(cache.states.slots):
        cache.states.clear(slot)
    for layer in range(config.layers):
        shapes = [(min(TOUCHED, size), heads, width) for _, heads, width in 2 * config.cache_shapes(layer)]
        keys, values = (torch.zeros(shape, dtype=runner.dtype, device=runner.device) for shape in shapes[:2])
        for block in range(cache.window_blocks if cache.windowed(layer) else cache.blocks):
            for start in range(0, size, TOUCHED):
                count = min(TOUCHED, size - start)
                chunk = Chunk([0] * count, start, (block,), 0, window_blocks=(block,))
                batch = Batch.of([chunk], size, runner.device)
                cache.write(layer, batch, *(Stored.of(part[:count], cache.dtype) for part in (keys, values)))


def _run(runner: ModelRunner, cache: KVCache, context: int, tokens: int, sequences: int) -> None:
    # The chunk of one sequence that ends where the context ends, then `DECODED` tokens of all sequences at the end.
    needed = -(-context // cache.block_size)
    places = [range(first, first + needed) for first in range(0, sequences * needed, needed)]
    blocks = [tuple(place % cache.blocks for place in row) for row in places]
    windows = [tuple(place % cache.window_blocks for place in row) if cache.window_blocks else None for row in places]
    start = context - tokens - DECODED
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    samplers = [Sampler(sampling, runner.config.vocab_size, runner.device) for _ in range(sequences)]
    logits = runner.run([Chunk([0] * tokens, start, blocks[0], 1, window_blocks=windows[0])], cache)
    logits = logits.expand(sequences, -1)
    for position in range(start + tokens, context):
        drawn = [token for token in sample_rows(logits, samplers) if isinstance(token, int)]
        chunks = [
            Chunk([drawn[index]], position, blocks[index], 1, index, window_blocks=windows[index])
            for index in range(sequences)
        ]
        logits = runner.run(chunks, cache)


def measure_memory(
    folder: ModelFolder, plan: MemoryPlan, placement: Placement, *, allow_nonfinite: bool = False
) -> list[MemoryPart]:
    """Load the model of `folder`, run it, and compare its memory with the estimate of `plan`, without a draft."""
    predicted, device, meter = estimate(plan), placement.device, MemoryMeter(placement.device)
    _warm_up(device, placement.dtype)
    empty = _storages(device)
    meter.begin()
    runner = load_model(folder, placement, allow_nonfinite=allow_nonfinite, expert_slots=plan.expert_slots)
    model = runner.model
    loaded = _storages(device)
    embeddings = model.embedding.nbytes + (0 if plan.config.tie_embeddings else model.head.nbytes)
    tables = (model.per_layer, model.positions, model.streams)
    embeddings += sum(module.nbytes for module in tables if module is not None)
    capacity = cache_positions(plan.context)
    slots = state_slots(runner.config, plan.running or plan.batch)
    cache = runner.make_cache(replace(plan, context=capacity).cache_shape, slots)
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
    """Raise GateError if a part is off by more than `tolerance`, either way."""
    wrong = [part for part in parts if not part.within(tolerance)]
    if wrong:
        off = ", ".join(f"{part.name} {part.error:+.1%}" for part in wrong)
        raise GateError(
            f"the estimate is off by more than {100 * tolerance:g}%: {off}", "please report this with the table above"
        )
