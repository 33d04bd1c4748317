"""The decoder: embedding, blocks of attention and MLP, norm, head. One class; families differ by their ModelConfig.

Building one takes no memory: tensors appear when a checkpoint is read. Whether a linear is dense or packed is decided
by the tensors of the checkpoint, in `Linear`. Does not know text, sampling, or how long a conversation will be.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import addressof, c_int64
from functools import partial

import torch
from torch import Tensor, nn

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.device.placement import use_device
from mycli.runtime.device.system import cpu
from mycli.runtime.kernels.cpu.layer import CHead, CLoop, run_head, run_passes
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.expert_slots import ExpertReads, ExpertSource
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.native.chain import Chain
from mycli.runtime.layers.native.parts import NativePart, NativePass, head_part, native_code
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.per_layer import PerLayerInputs
from mycli.runtime.layers.recurrent import DeltaNet, ShortConv
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.vocabulary import embed_tokens, embedding_scale, finish_logits
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import Packing

LOADED_AT_ONCE = 4  # layers: each has its tensors in memory twice for a moment


class Transformer(nn.Module):
    """A whole model. `load_model` in `runtime.engine.loader` reads one and gives it to what runs it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, device="meta")
        self.blocks = Chain(Block(config.layer(index)) for index in range(config.layers))
        self.per_layer = PerLayerInputs(config) if config.per_layer_width else None
        self.norm = RMSNorm(config.norm())
        self.head = Linear((config.head(),))
        self._native_head: NativePart[CHead] = NativePart([self.norm], [self.head])
        self.expert_reads: ExpertReads | None = None

    def load(
        self,
        checkpoint: Checkpoint,
        packings: Mapping[str, Packing],
        device: torch.device,
        dtype: torch.dtype,
        expert_slots: int | None = None,
    ) -> None:
        """Read all tensors straight into place, a few layers at once: reading is copying, and one core copies slowly.

        With `expert_slots` so many experts of a layer are in memory at a time, and `expert_reads` counts the reading of
        the others. Of several errors the first in the order of the model is raised.
        """
        some = None
        if expert_slots is not None:
            some = ExpertSource(checkpoint, packings, device, dtype, expert_slots)
            self.expert_reads = some.reads

        def read_embedding() -> None:
            table = LinearSpec(formats.EMBEDDING, self.config.vocab_size, self.config.hidden_size)
            self.embedding = formats.read_dense(checkpoint, table, packings, torch.device("cpu")).to(device, dtype)

        first, *others = self.layers()
        loads: list[Callable[[], None]] = [read_embedding]
        loads += [partial(block.load, checkpoint, packings, device, dtype, some) for block in others]
        loads.append(partial(self.norm.load, checkpoint, device, dtype))
        if self.per_layer is not None:
            loads.append(partial(self.per_layer.load, checkpoint, device, dtype))
        if not self.config.tie_embeddings:
            loads.append(partial(self.head.load, checkpoint, packings, device, dtype))
        first.load(checkpoint, packings, device, dtype, some)  # alone: kernels are compiled and tried
        workers = min(LOADED_AT_ONCE, cpu().cores)
        with ThreadPoolExecutor(workers, initializer=use_device, initargs=(device,)) as pool:
            jobs = [pool.submit(load) for load in loads]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        if self.config.tie_embeddings:
            self.head.replace(self.embedding)

    def keep_dense_copies(self) -> None:
        """Keep packed weights of the blocks densely too, for prompts; the head sees one token of those."""
        for block in self.layers():
            for linear in block.products.values():
                linear.keep_dense_copy(self.dtype)

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

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory, a tied embedding once."""
        total = sum(module.nbytes for module in self.modules() if isinstance(module, Linear))
        total += sum(module.weight.nbytes for module in self.modules() if isinstance(module, RMSNorm))
        total += sum(module.nbytes for module in self.modules() if isinstance(module, DeltaNet | ShortConv))
        total += 0 if self.per_layer is None else self.per_layer.nbytes
        return total + (0 if self.config.tie_embeddings else self.embedding.nbytes)

    def hidden(self, batch: Batch, rope: Rope, cache: KVCache) -> Tensor:
        """The residual stream after the last block: [1, T, hidden]. Keys and values go into the cache."""
        tokens = batch.tokens[None]
        x = embed_tokens(tokens, self.embedding, self.config)
        told = None if self.per_layer is None else self.per_layer(tokens, x)
        return self.blocks.run(x, batch, rope, cache, told)

    def _logits(self, x: Tensor) -> Tensor:
        """What the head makes of the residual stream x [rows, hidden]: [rows, vocab], in one call where it can be."""
        library = native_code(x)
        head = None if library is None else self._native_head.get(lambda: head_part(self.norm, self.head))
        if library is None or head is None:
            logits: Tensor = self.head(self.norm(x))
            return logits
        return run_head(library, head, x)

    @torch.inference_mode()
    def forward(
        self, batch: Batch, rope: Rope, cache: KVCache, listener: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Logits fp32 [rows, vocab] of the rows that the batch wants them of, maybe none.

        `listener` is shown what the head reads of all rows, or would, [T, hidden].
        """
        x = self.hidden(batch, rope, cache)[0]
        if listener is not None:
            listener(self.norm(x))
        if sum(batch.wanted) < batch.rows:
            x = x.index_select(0, batch.logits_at)
        if not len(x):
            return torch.empty(0, self.config.vocab_size, device=x.device)
        return finish_logits(self._logits(x), self.config)

    @torch.inference_mode()
    def follow(
        self, batch: Batch, rope: Rope, cache: KVCache, passes: int, choices: int, stops: Sequence[int]
    ) -> list[list[int]] | None:
        """The likeliest of the first `choices` tokens [passes][sequences] after the one token of each sequence of
        `batch`, and then after each of those, in one call; None where native code does not take all of a pass.

        -1 for logits that are no numbers. Fewer than `passes` after that, and after one of `stops`. The blocks of the
        batch have room for as many tokens.
        """
        config, longest = self.config, max([span.length for span in batch.spans])
        if self.per_layer is not None or config.logit_softcap is not None or rope.every(longest + passes - 1) is None:
            return None
        native = NativePass.make(self.embedding[None, : batch.rows], batch, cache, rope)  # as the stream's rows are
        chain = None if native is None else self.blocks.whole(native)
        head = None if chain is None else self._native_head.get(lambda: head_part(self.norm, self.head))
        if native is None or chain is None or head is None or not self.embedding.is_contiguous():
            return None
        ends, width = (c_int64 * len(stops))(*stops), config.hidden_size
        scales = embedding_scale(config, self.dtype), config.logit_scale
        loop = CLoop(self.embedding.data_ptr(), width, choices, addressof(ends), len(stops), *scales)
        return run_passes(native.library, chain, head, loop, native.rows, batch.tokens.tolist(), passes)
