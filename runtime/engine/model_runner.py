"""A loaded model and its ways of running: launch by launch, by replayed passes, or several tokens a launch.

Whoever runs a model hands over the chunks of a pass and a cache, and does not learn which way was taken. Knows the
kinds of caches and the rotary tables that go with them; does not know text, sampling beyond a `DeviceSampling`, or whom
it serves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mycli.runtime.cache.block_table import Chunk
from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.device.placement import use_device
from mycli.runtime.engine.speculation import Listener
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.estimate import SHARED_BLOCK
from mycli.runtime.models.config import KvDtype, ModelConfig
from mycli.runtime.sampling.sampler import DeviceSampling

if TYPE_CHECKING:  # Triton, which takes a second to import and is not everywhere
    from mycli.runtime.engine.cuda_graph import Replay


class TokenLoop(Protocol):
    """Makes several tokens without the host between them; see `DeviceLoop` and `CpuLoop`."""

    def launches(
        self, batch: Batch, choice: DeviceSampling, rope: Rope, cache: KVCache, count: int, stops: frozenset[int]
    ) -> Iterator[tuple[list[list[int]], float]] | None:
        """The `count` tokens after the one token of each sequence, or the first of them, by launches:
        [steps][sequences], and the seconds that they took; None where the model's own passes are to do it.

        Below 0 where logits were not numbers. What comes after one of `stops` may be left out.
        """
        ...


@dataclass(frozen=True)
class FastPaths:
    """What a model has beside its plain pass; see `runtime.engine.device_loop.accelerate` and `CpuLoop.make`."""

    replay: "Replay | None" = None
    loop: TokenLoop | None = None


@dataclass(frozen=True)
class CacheShape:
    """context: tokens of a sequence at most; blocks, block_size: of the cache.

    `lanes` gives every sequence one block as long as the context, which kernels read as it lies; `paged` lets sequences
    share the cache block by block.
    """

    context: int
    blocks: int
    block_size: int

    @classmethod
    def lanes(cls, context: int, sequences: int = 1) -> "CacheShape":
        """Room for `sequences` of any length up to `context`."""
        return cls(context, sequences, context)

    @classmethod
    def paged(cls, context: int, tokens: int, block_size: int) -> "CacheShape":
        """Room for `tokens` of all sequences together."""
        return cls(context, -(-tokens // block_size), block_size)


def cache_shape(context: int, sequences: int, running: int, device: torch.device) -> CacheShape:
    """Room for `sequences` of `context` tokens, shared by the `running` ones on a CPU.

    One sequence has one lane, which is read as it lies; so has every sequence on a GPU, whose fused pass reads lanes.
    """
    if max(sequences, running) == 1 or device.type == "cuda":
        return CacheShape.lanes(context, sequences)
    return CacheShape.paged(context, context * sequences, SHARED_BLOCK)


class ModelRunner:
    """Runs one model with caches of one kind."""

    def __init__(self, model: Transformer, kv: KvDtype = "auto", fast: FastPaths | None = None) -> None:
        self.model = model
        self.kv = kv
        self.fast = fast or FastPaths()
        self._rope: Rope | None = None
        self._positions = 0

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self.model.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.model.nbytes

    def make_cache(self, shape: CacheShape, slots: int = 1) -> KVCache:
        """An empty cache, with `slots` for the states of layers that keep some."""
        dtype = cache_dtype(self.kv, self.dtype)
        return KVCache(self.config, shape.blocks, shape.block_size, self.device, dtype, slots)

    def rope(self, context: int) -> Rope:
        """The rotary tables of `context` positions or more: one for all caches."""
        if self._rope is None or context > self._positions:
            self._rope, self._positions = Rope(self.config, context, self.device, self.dtype), context
        return self._rope

    def run(self, chunks: Sequence[Chunk], cache: KVCache, listener: Listener | None = None) -> Tensor:
        """Logits fp32 [rows, vocab] of the tokens whose logits the chunks ask for, in order.

        Keys and values go into the cache. The result is the caller's. `listener` is shown the hidden states, which
        passes that are replayed do not show.
        """
        use_device(self.device)
        batch = Batch.of(chunks, cache.block_size, self.device)
        rope = self.rope(max(cache.block_size, *(span.length for span in batch.spans)))
        replay = self.fast.replay if listener is None else None
        found = None if replay is None else self._replayed(replay, batch, rope, cache)
        return self.model(batch, rope, cache, listener) if found is None else found

    @torch.inference_mode()
    def _replayed(self, replay: "Replay", batch: Batch, rope: Rope, cache: KVCache) -> Tensor | None:
        """As `run`, a copy of what a fused pass gives; None where it does not take the batch."""
        found = replay(batch, rope, cache)
        return None if found is None else found.flatten(0, 1).to(torch.float32, copy=True)

    def launches(
        self,
        chunks: Sequence[Chunk],
        choice: DeviceSampling | None,
        cache: KVCache,
        count: int,
        stops: frozenset[int],
    ) -> Iterator[tuple[list[list[int]], float]] | None:
        """The `count` tokens of each sequence after its chunk of one token, chosen on the device, by launches.

        As `TokenLoop.launches`; None where the tokens are to be made by `run`, one after another.
        """
        if self.fast.loop is None or choice is None:
            return None
        use_device(self.device)
        batch = Batch.of(chunks, cache.block_size, self.device)
        return self.fast.loop.launches(batch, choice, self.rope(cache.block_size), cache, count, stops)
