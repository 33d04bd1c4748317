"""A loaded model with its compiled passes: runs chunks of sequences by the fastest pass that takes them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.device.placement import use_device
from mycli.runtime.engine.passes import Passes
from mycli.runtime.engine.passes.base import PassInput, TokenSteps
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import HiddenStateHook, Transformer
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.memory.plan import prefill_chunk
from mycli.runtime.models.config import KvDtype, ModelConfig
from mycli.runtime.quantization.activations import ActivationChoice
from mycli.runtime.sampling.sampler import DeviceSampling


class ModelRunner:
    """Runs one model with caches of one kind; without `passes` by the plain pass alone.

    activations: how CPU kernels round activations next to packed weights; None if they do not.
    """

    def __init__(
        self,
        model: Transformer,
        kv: KvDtype = "auto",
        passes: Passes | None = None,
        activations: ActivationChoice | None = None,
    ) -> None:
        self.model = model
        self.device = model.device
        self.kv = kv
        self.activations = activations
        self.passes = passes or Passes((PlainPass(model),), {})
        self._rope: Rope | None = None
        self._positions = 0

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self.model.dtype

    @property
    def nbytes(self) -> int:
        return self.model.nbytes

    def make_cache(self, shape: CacheShape, slots: int = 1) -> KVCache:
        """Return an empty cache with `slots` for recurrent states."""
        dtype = cache_dtype(self.kv, self.dtype)
        return KVCache(self.config, shape.blocks, shape.block_size, self.device, dtype, slots, shape.window_blocks)

    def rope(self, context: int) -> Rope:
        """Return rotary tables of at least `context` positions, shared by all caches."""
        if self._rope is None or context > self._positions:
            self._rope = Rope(self.config, context, self.device, self.dtype, self.model.portable)
            self._positions = context
        return self._rope

    def run(self, chunks: Sequence[Chunk], cache: KVCache, hook: HiddenStateHook | None = None) -> Tensor:
        """Return logits fp32 [rows, vocab] of the rows that the chunks ask for; the cache takes keys and values."""
        if self.device.type == "cuda":
            use_device(self.device)
        # Dynamic RoPE scaling needs tables of the longest sequence, which may span several blocks.
        positions = cache.block_size
        for chunk in chunks:
            positions = max(positions, chunk.start + len(chunk.tokens))
        work = PassInput(chunks, cache, self.rope(positions), hook)
        chosen = self.passes.choose(work)
        assert chosen is not None  # the plain pass takes all logits
        return chosen.logits(work)

    def hidden_states(self, tokens: Sequence[int]) -> Tensor:
        """Return [tokens, hidden], what the head reads, computed in a cache of their own, chunk by chunk."""
        states: list[Tensor] = []
        cache = self.make_cache(CacheShape.contiguous(len(tokens)))
        size = prefill_chunk(self.device.type == "cuda")
        for start in range(0, len(tokens), size):
            self.run([Chunk(tokens[start : start + size], start, (0,), 0)], cache, states.append)
        return torch.cat([state.flatten(0, -2) for state in states])

    def tokens(
        self,
        chunks: Sequence[Chunk],
        sampling: Sequence[DeviceSampling],
        cache: KVCache,
        count: int,
        stop_ids: Sequence[frozenset[int]],
    ) -> Iterator[TokenSteps] | None:
        """Yield the next tokens of each sequence, up to `count`, by passes that also sample.

        chunks: the last token of each sequence; stop_ids: of each. Returns None if no pass takes this: sample from the
        logits of `run`.
        """
        if self.device.type == "cuda":
            use_device(self.device)
        rope = self.rope(cache.block_size)
        work = PassInput(chunks, cache, rope, sampling=sampling, count=count, stop_ids=stop_ids)
        chosen = self.passes.choose(work)
        return None if chosen is None else chosen.tokens(work)
