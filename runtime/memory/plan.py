"""The input of a memory estimate: a model and how it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mycli.runtime.memory.cache_shape import CacheShape, cache_shape
from mycli.runtime.models.config import KvDtype, ModelConfig
from mycli.runtime.quantization.int4_vectors import int4_bytes
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import BY_NAME, Dtype, PromptCopy

SCALE_BYTES = 4  # of an int8 cache: one fp32 per head and token
DEFAULT_CONTEXT = 8192
CACHE_BLOCK = 16  # positions; the context is rounded up to a multiple


@dataclass(frozen=True)
class MemoryPlan:
    config: ModelConfig
    packings: Mapping[str, Packing] = field(default_factory=dict)
    context: int = DEFAULT_CONTEXT
    batch: int = 1  # sequences of full length that the cache holds
    dtype: Dtype | None = None  # of activations and dense weights; None: as in config.json
    gpu: bool = False
    draft: "MemoryPlan | None" = None
    drafts_without_model: bool = False  # n-grams draft tokens
    kv: KvDtype = "auto"
    prompt_copy: PromptCopy = "none"  # how packed weights of the blocks are also stored
    running: int | None = None  # sequences that share the cache; None: `batch`
    whole_windows: bool = False  # layers with a sliding window store every position
    adapter_values: int = 0  # of an adapter that is computed next to packed weights
    expert_slots: int | None = None  # experts per layer in memory, the rest are read from disk on demand; None: all

    @property
    def value_bytes(self) -> int:
        return BY_NAME[self.dtype or self.config.dtype].nbytes

    @property
    def scale_bytes(self) -> int:
        return BY_NAME[self.config.dtype].nbytes  # scales of packed weights stay as stored, whatever `dtype` is

    def token_bytes(self, layer: int) -> int:
        """Return the bytes of one token in the cache of a layer: keys and values, with scales if quantized."""
        shapes = self.config.cache_shapes(layer)
        if self.kv == "int4":
            return sum(vectors * heads * int4_bytes(size) for vectors, heads, size in shapes)
        value = {"auto": self.value_bytes, "bf16": 2, "int8": 1}[self.kv]
        scale = SCALE_BYTES if self.kv == "int8" else 0
        return sum(vectors * heads * (size * value + scale) for vectors, heads, size in shapes)

    @property
    def cache_shape(self) -> CacheShape:
        shape = cache_shape(self.config, self.context, self.batch, self.running or self.batch, self.chunk)
        return shape.without_windows() if self.whole_windows else shape

    @property
    def rows(self) -> int:
        return max(self.chunk, self.batch)

    @property
    def chunk(self) -> int:
        tokens = prefill_chunk(self.gpu)
        # A bidirectional model computes each text whole, and shorter ones together.
        return max(self.context, tokens) if self.config.bidirectional else min(self.context, tokens)


def cache_positions(context: int) -> int:
    return -(-context // CACHE_BLOCK) * CACHE_BLOCK


def prefill_chunk(gpu: bool) -> int:
    """Return how many prompt tokens one pass computes at most."""
    # Bounds the activations and the wait for Ctrl-C. A GPU unpacks every weight for each chunk, which moves 2.5 bytes
    # per 2 x chunk operations: a ninth of the time on an H200 at 2048.
    return 2048 if gpu else 512
