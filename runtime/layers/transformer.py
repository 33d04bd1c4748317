"""The decoder: embedding, blocks of attention and MLP, norm, head. One class; families differ by their ModelConfig.

Building one takes no memory: tensors appear when a checkpoint is read. Whether a linear is dense or packed is decided
by the tensors of the checkpoint, in `Linear`. Does not know text, sampling, or how long a conversation will be.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycli.runtime.cache.kv_cache import KeyValues, StaticCache, Stored, cache_dtype
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.device.system import cpu
from mycli.runtime.kernels.cpu.elementwise import rms_norm, silu_multiply
from mycli.runtime.layers.attention import attend, visible
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.linear import DenseMatmul, Linear
from mycli.runtime.layers.rope import Rope, rotate
from mycli.runtime.models.config import Kv, ModelConfig
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.sampling.sampler import Choice

Masks = Mapping[int | None, Tensor | None]
LOADED_AT_ONCE = 4  # layers: each has its tensors in memory twice for a moment


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) over the last dimension, with a gain."""

    def __init__(self, name: str, size: int, eps: float) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.weight = torch.empty(size, device="meta")

    def load(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """Read the gain."""
        self.weight = checkpoint.read(f"{self.name}.weight").to(device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as x."""
        y = rms_norm(x, self.weight, self.eps)
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps) if y is None else y


class Block(nn.Module):
    """One layer: attention and MLP, each on a normed copy of the residual stream.

    `INPUTS` names its products in order of execution; the linears within one share their input, so calibration observes
    each input once.
    """

    INPUTS = ("qkv", "o", "gate_up", "down")

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        prefix = f"model.layers.{layer}"
        linears = config.block_linears(layer)
        self.config = config
        self.layer = layer
        self.input_norm = RMSNorm(f"{prefix}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.qkv = Linear(linears["qkv"])
        self.o = Linear(linears["o"])
        self.post_norm = RMSNorm(f"{prefix}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps)
        self.gate_up = Linear(linears["gate_up"])
        self.down = Linear(linears["down"])
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(f"{prefix}.self_attn.q_norm", config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(f"{prefix}.self_attn.k_norm", config.head_dim, config.rms_norm_eps)

    def product(self, name: str) -> Linear:
        """The linears of one of `INPUTS`."""
        found = getattr(self, name)
        assert isinstance(found, Linear)
        return found

    def norms(self) -> list[RMSNorm]:
        """Those it has."""
        return [norm for norm in (self.input_norm, self.post_norm, self.q_norm, self.k_norm) if norm is not None]

    def load(
        self, checkpoint: Checkpoint, packings: Mapping[str, Packing], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Read this layer's tensors."""
        for module in self.children():
            if isinstance(module, RMSNorm):
                module.load(checkpoint, device, dtype)
            elif isinstance(module, Linear):
                module.load(checkpoint, packings, device, dtype)

    def attended(self, x: Tensor, tables: tuple[Tensor, Tensor], masks: Masks, cache: KeyValues | None) -> Tensor:
        """What `o` gets: x [sequences, tokens, hidden], normed, through attention: [..., heads * head_dim]."""
        config, (batch, tokens, _) = self.config, x.shape
        sizes = [config.heads, config.kv_heads, config.kv_heads]
        projected = self.qkv(self.input_norm(x)).view(batch, tokens, sum(sizes), config.head_dim)
        query, key, value = projected.split(sizes, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, *tables), rotate(key, *tables).transpose(1, 2)
        value = value.transpose(1, 2)
        stored = (Stored(key), Stored(value)) if cache is None else cache.write(self.layer, cache.length, key, value)
        window = config.window(self.layer)
        return attend(query, *stored, masks[window], window)

    def activated(self, x: Tensor) -> Tensor:
        """What `down` gets: x [..., hidden] after attention, normed, through the gate: [..., intermediate]."""
        both = self.gate_up(self.post_norm(x))
        activated = silu_multiply(both)
        if activated is None:
            gate, up = both.chunk(2, dim=-1)
            activated = functional.silu(gate) * up
        return activated

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], masks: Masks, cache: KeyValues | None) -> Tensor:
        """x [sequences, tokens, hidden] to the same; `cache` None attends to these tokens only."""
        x = x + self.o(self.attended(x, tables, masks, cache))
        down: Tensor = self.down(self.activated(x))
        return x + down


class ShortPass(Protocol):
    """Does passes over a few tokens faster; see `runtime.engine.cuda_graph`."""

    def __call__(self, batch: Batch, rope: Rope, cache: StaticCache) -> Tensor | None:
        """Logits [sequences, 1 or new, vocab], valid until the next call; None where it does not take the pass."""
        ...


class Loop(Protocol):
    """Makes several tokens without the host; see `runtime.engine.device_loop`."""

    def launches(
        self, token: Tensor, choice: Choice, rope: Rope, cache: StaticCache, count: int
    ) -> Iterator[tuple[list[list[int]], float]] | None:
        """The `count` tokens of each sequence after `token` [sequences, 1], by launches with their seconds."""
        ...


class Transformer(nn.Module):
    """A whole model. `load` in `runtime.engine.loader` makes one that can run."""

    short_pass: ShortPass | None = None
    loop: Loop | None = None

    def __init__(self, config: ModelConfig, kv: Kv = "auto") -> None:
        """`kv`: the kind of the caches it is run with."""
        super().__init__()
        self.config = config
        self.kv = kv
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, device="meta")
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps)
        self.head = Linear((config.head(),))

    def load(
        self, checkpoint: Checkpoint, packings: Mapping[str, Packing], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Read all tensors straight into place, a few layers at once: reading is copying, and one core copies slowly.

        Of several errors the first in the order of the model is raised.
        """

        def embed() -> None:
            self.embedding = checkpoint.read("model.embed_tokens.weight").to(device, dtype)

        first, *others = self.layers()
        loads: list[Callable[[], None]] = [embed]
        loads += [partial(block.load, checkpoint, packings, device, dtype) for block in others]
        loads.append(partial(self.norm.load, checkpoint, device, dtype))
        if not self.config.tie_embeddings:
            loads.append(partial(self.head.load, checkpoint, packings, device, dtype))
        first.load(checkpoint, packings, device, dtype)  # alone: kernels are compiled and tried
        with ThreadPoolExecutor(min(LOADED_AT_ONCE, cpu().cores)) as pool:
            jobs = [pool.submit(load) for load in loads]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        if self.config.tie_embeddings:
            self.head.matmuls = (DenseMatmul(self.embedding),)

    def keep_shadow(self) -> None:
        """Keep packed weights of the blocks densely too, for prompts; the head sees one token of those."""
        for block in self.layers():
            for name in block.INPUTS:
                block.product(name).keep_shadow(self.dtype)

    def layers(self) -> Iterator[Block]:
        """The blocks, typed."""
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self.embedding.dtype

    def make_cache(self, capacity: int, sequences: int = 1) -> StaticCache:
        """An empty cache of the kind that this model is run with."""
        return StaticCache(self.config, capacity, self.device, cache_dtype(self.kv, self.dtype), sequences)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory, a tied embedding once."""
        total = sum(module.nbytes for module in self.modules() if isinstance(module, Linear))
        total += sum(module.weight.nbytes for module in self.modules() if isinstance(module, RMSNorm))
        return total + (0 if self.config.tie_embeddings else self.embedding.nbytes)

    def masks(self, start: int, count: int) -> Masks:
        """What each kind of layer may see, made once a pass."""
        windows = {self.config.window(layer) for layer in range(self.config.layers)}
        return {window: visible(start, count, window, self.device) for window in windows}

    def hidden(self, batch: Batch, rope: Rope, cache: StaticCache | None = None) -> Tensor:
        """The residual stream after the last block and norm: [sequences, new, hidden]. Advances the cache."""
        if cache is not None and cache.length != batch.start:
            raise ValueError(f"the batch starts at {batch.start}, the cache holds {cache.length}")
        tables, masks = rope.tables(batch.start, batch.count), self.masks(batch.start, batch.count)
        x = functional.embedding(batch.tokens, self.embedding)
        for block in self.blocks:
            x = block(x, tables, masks, cache)
        if cache is not None:
            cache.advance(batch.count)
        return x

    @torch.inference_mode()
    def forward(self, batch: Batch, rope: Rope, cache: StaticCache | None = None) -> Tensor | None:
        """Logits fp32 [sequences, 1 or new, vocab] as `batch.logits` asks; None for "none"."""
        if self.short_pass is not None and cache is not None:
            found = self.short_pass(batch, rope, cache)
            if found is not None:
                cache.advance(batch.count)
                return found.to(torch.float32, copy=True)
        x = self.hidden(batch, rope, cache)
        if batch.logits == "none":
            return None
        if batch.logits == "last":
            x = x[:, -1:]
        logits: Tensor = self.head(self.norm(x))
        return logits.float()
