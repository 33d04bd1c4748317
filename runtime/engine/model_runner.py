"""A loaded model and its ways of running: launch by launch, by replayed passes, or several tokens a launch.

Whoever runs a model hands over a `Batch` and a cache, and does not learn which way was taken. Knows the kinds of caches
and the rotary tables that go with them; does not know text, sampling beyond a `DeviceSampling`, or whom it serves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import StaticCache, cache_dtype
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.config import Kv, ModelConfig
from mycli.runtime.sampling.sampler import DeviceSampling

if TYPE_CHECKING:  # Triton, which takes a second to import and is not everywhere
    from mycli.runtime.engine.cuda_graph import Replay
    from mycli.runtime.engine.device_loop import DeviceLoop


@dataclass(frozen=True)
class FastPaths:
    """What a model has beside its plain pass; see `runtime.engine.device_loop.accelerate`."""

    replay: "Replay | None" = None
    loop: "DeviceLoop | None" = None


class ModelRunner:
    """Runs one model with caches of one kind."""

    def __init__(self, model: Transformer, kv: Kv = "auto", fast: FastPaths | None = None) -> None:
        self.model = model
        self.kv = kv
        self.fast = fast or FastPaths()
        self._ropes: WeakKeyDictionary[StaticCache, Rope] = WeakKeyDictionary()

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

    def make_cache(self, context: int, sequences: int = 1) -> StaticCache:
        """An empty cache for `context` tokens of each of `sequences`."""
        return StaticCache(self.config, context, self.device, cache_dtype(self.kv, self.dtype), sequences)

    def rope(self, cache: StaticCache) -> Rope:
        """The rotary tables of a cache's positions, made when they are first wanted and kept as long as the cache."""
        rope = self._ropes.get(cache)
        if rope is None:
            rope = self._ropes[cache] = Rope(self.config, cache.capacity, self.device, self.dtype)
        return rope

    def run(self, batch: Batch, cache: StaticCache) -> Tensor | None:
        """Logits fp32 [sequences, 1 or new, vocab] as `batch.logits` asks, None for "none". Advances the cache."""
        rope = self.rope(cache)
        found = None if self.fast.replay is None else self._replayed(self.fast.replay, batch, rope, cache)
        if found is None:
            found = self.model(batch, rope, cache)
        return found

    @torch.inference_mode()
    def _replayed(self, replay: "Replay", batch: Batch, rope: Rope, cache: StaticCache) -> Tensor | None:
        """As `run`, a copy of what a fused pass gives; None where it does not take the batch."""
        found = replay(batch, rope, cache)
        if found is None:
            return None
        cache.advance(batch.count)
        return found.to(torch.float32, copy=True)

    def launches(
        self, token: Tensor, choice: DeviceSampling | None, cache: StaticCache, count: int
    ) -> Iterator[tuple[list[list[int]], float]] | None:
        """The `count` tokens of each sequence after `token` [sequences, 1], chosen on the device, by launches.

        As `DeviceLoop.launches`; None where the tokens are to be made by `run`, one after another.
        """
        if self.fast.loop is None or choice is None:
            return None
        return self.fast.loop.launches(token, choice, self.rope(cache), cache, count)
