"""What is to be run, as far as its memory is concerned. Does not import torch, read files, or ask the machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mycli.runtime.models.config import KvDtype, ModelConfig
from mycli.runtime.quantization.int4_vectors import int4_bytes
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import BY_NAME, Dtype

SCALE_BYTES = 4  # of an int8 cache: one fp32 per vector
DEFAULT_CONTEXT = 8192


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
    kv: KvDtype = "auto"
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
        heads, head_dim = self.config.kv_shape(layer)
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


def prefill_chunk(gpu: bool) -> int:
    """Tokens of a prompt that go through the model at once: bounds the activations, and Ctrl-C is heard between two.

    A GPU unpacks every weight for each chunk: 2.5 bytes to move beside 2 x chunk operations, a ninth of them on an H200
    at 2048.
    """
    return 2048 if gpu else 512
