"""Decoding that stays in native code on the CPU: a call makes several tokens, where nobody has to look at each.

A pass of a small model takes as long as Python does from one to the next. So a call has as many passes as fit a few
milliseconds: of a large model one. The bits are those of pass by pass. Knows how long passes took; does not know the
cache's owners or who reads the tokens.
"""

import time
from collections.abc import Iterator

import torch

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.sampling.sampler import DeviceSampling

CALL_SECONDS = 0.005  # who comes meanwhile waits as long, and a reader gets as many tokens at once


class CpuLoop:
    """The loop of one model."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._seconds: dict[int, float] = {}  # of the last pass of so many sequences

    @classmethod
    def make(cls, model: Transformer) -> "CpuLoop | None":
        """None for a model that native code does not take whole anyway."""
        return cls(model) if model.dtype == torch.bfloat16 and not model.config.has_recurrent else None

    def launches(
        self,
        batch: Batch,
        choice: DeviceSampling,
        rope: Rope,
        cache: KVCache,
        count: int,
        stops: frozenset[int],
    ) -> Iterator[tuple[list[list[int]], float]] | None:
        """The first of the `count` tokens after the one token of each sequence of `batch`: [steps][sequences], seconds.

        Below 0 where logits were not numbers; none after that or one of `stops`. None for what draws: its numbers are
        the host's.
        """
        if choice.temperature:
            return None
        sequences, began = len(batch.spans), time.perf_counter()
        passes = min(count, int(CALL_SECONDS / self._seconds.get(sequences, CALL_SECONDS)) or 1)
        made = self._model.follow(batch, rope, cache, passes, choice.vocab_size, sorted(stops))
        if made is None:
            return None
        seconds = time.perf_counter() - began
        self._seconds[sequences] = seconds / len(made)
        return iter([(made, seconds)])
