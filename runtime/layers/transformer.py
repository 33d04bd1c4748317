"""The decoder: embedding, blocks of attention and MLP, norm, head. One class; families differ by their ModelConfig."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from mycli.runtime.cache.batch import Batch
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.checkpoint import formats
from mycli.runtime.device.placement import use_device
from mycli.runtime.device.system import cpu, release_free_memory
from mycli.runtime.layers.attention import PagedAttention
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.layer_part import PassContext
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.recurrent import BatchStates, Mixer, clear_new_states
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.vocabulary import embed_tokens, finish_logits
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.utils.dtypes import PromptCopy

LOADED_IN_PARALLEL = 4  # layers: each has its tensors in memory twice while it is converted

HiddenStateHook = Callable[[Tensor], None]  # receives the input of the head for every token of a pass, [T, hidden]


def _load_and_trim(load: Callable[[], None]) -> None:
    load()
    release_free_memory()  # the buffers of conversions; the next ones are allocated in other fragments


class Transformer(nn.Module):
    """A whole model; its tensors take no memory before `load`.

    `expert_reads`: counts of streamed experts, None if all experts are in memory.
    """

    def __init__(self, config: ModelConfig, expert_slots: int | None = None) -> None:
        """expert_slots: experts of each layer kept in memory, the others being read on demand; None keeps all."""
        super().__init__()
        self.config = config
        self.expert_reads, streamed = None, None
        if expert_slots is not None:
            from mycli.runtime.layers.streamed_experts import ExpertReads

            self.expert_reads = ExpertReads()
            streamed = expert_slots, self.expert_reads
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, device="meta")
        self.blocks = nn.ModuleList(Block(config.layer(index), streamed) for index in range(config.layers))
        self.per_layer = None
        if config.per_layer_width:
            from mycli.runtime.layers.per_layer import PerLayerInputs

            self.per_layer = PerLayerInputs(config)
        self.positions = None
        if config.positions is not None:
            from mycli.runtime.layers.positions import PositionEmbeddings

            self.positions = PositionEmbeddings(config.positions)
        self.classifier = None
        if config.classifier is not None:
            from mycli.runtime.layers.classifier import Classifier

            self.classifier = Classifier(config.classifier)
        self.streams = None
        if config.streams > 1:
            from mycli.runtime.layers.streams import Streams

            self.streams = Streams(config)
        self.norm = RMSNorm(config.norm())
        self.head = Linear((config.head(),))
        self.prompt_copy: PromptCopy = "none"
        self.portable = False  # whether logits have the same bits on every CPU

    def make_portable(self) -> None:
        """Compute the same bits on every CPU; to be called before `load`."""
        self.portable = True
        linears = [linear for block in self.layers() for linear in block.products.values()]
        for module in (*self.modules(), *linears):
            if isinstance(module, Linear):
                module.portable = True

    def load(self, weights: CheckpointWeights) -> None:
        """Read all tensors into place, a few layers in parallel: one core copies slower than memory allows.

        Of several errors the first in the order of the model is raised.
        """

        def read_embedding() -> None:
            table = LinearSpec(formats.EMBEDDING, self.config.vocab_size, self.config.hidden_size)
            host = torch.device("cpu")
            dense = formats.read_dense(weights.checkpoint, table, weights.packings, host, weights.dtype)
            self.embedding = dense.to(weights.device)

        first, *others = self.layers()
        loads: list[Callable[[], None]] = [read_embedding]
        loads += [partial(block.load, weights) for block in others]
        loads.append(partial(self.norm.load, weights))
        optional = (self.per_layer, self.positions, self.streams, self.classifier)
        loads += [partial(module.load, weights) for module in optional if module is not None]
        if not self.config.tie_embeddings:
            loads.append(partial(self.head.load, weights))
        first.load(weights)  # alone: kernels are compiled and checked on first use
        workers = min(LOADED_IN_PARALLEL, cpu().cores)
        with ThreadPoolExecutor(workers, initializer=use_device, initargs=(weights.device,)) as pool:
            try:
                for job in [pool.submit(_load_and_trim, load) for load in loads]:
                    job.result()
            except BaseException:
                weights.checkpoint.cancel()  # the pool waits for the blocks that are being read
                pool.shutdown(cancel_futures=True)
                raise
        if self.config.tie_embeddings:
            self.head.replace(self.embedding)

    def keep_prompt_copies(self, kind: PromptCopy) -> int:
        """Keep copies of the blocks' packed weights for prompts; return how many products have none.

        The head has none: it computes one row of a prompt.
        """
        self.prompt_copy = kind
        return sum(block.keep_prompt_copies(kind, self.dtype) for block in self.layers())

    def layers(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in memory; a tied embedding counts once."""
        total = sum(module.nbytes for module in self.modules() if isinstance(module, Linear | RMSNorm | Mixer))
        optional = (self.per_layer, self.positions, self.classifier)
        total += sum(module.nbytes for module in optional if module is not None)
        return total + (0 if self.config.tie_embeddings else self.embedding.nbytes)

    def enter(self, tokens: Tensor, positions: Callable[[], Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return what the first layer reads for tokens int64 [1, T], and per-layer inputs or None.

        positions: returns int64 [T]; only called for a model with a table of positions.
        """
        x = embed_tokens(tokens, self.embedding, self.config)
        if self.positions is not None:
            x = self.positions.add_positions(x, positions())
        inputs = None if self.per_layer is None else self.per_layer(tokens, x)
        return x if self.streams is None else self.streams.enter(x), inputs

    def leave(self, x: Tensor) -> Tensor:
        """Return what the last norm reads, [..., hidden], from the output of the last layer."""
        return x if self.streams is None else self.streams.leave(x)

    @torch.inference_mode()
    def forward(self, batch: Batch, rope: Rope, cache: KVCache, hook: HiddenStateHook | None = None) -> Tensor:
        """Return logits fp32 [rows, vocab] of the rows that the chunks ask for; keys and values go into the cache."""
        x, inputs = self.enter(batch.tokens[None], batch.positions)
        x = self.leave(run_layers(self.layers(), x, batch, rope, cache, inputs)[0])
        return self._logits(x, batch, hook)

    def _logits(self, x: Tensor, batch: Batch, hook: HiddenStateHook | None) -> Tensor:
        if hook is not None:
            hook(self.norm(x))
        if sum(chunk.logits for chunk in batch.chunks) < batch.rows:
            x = x.index_select(0, batch.logits_at)
        if not len(x):
            return torch.empty(0, self.config.vocab_size, device=x.device)
        return finish_logits(self.head(self.norm(x)), self.config, self.portable)


def run_layers(
    blocks: Iterable[Block],
    x: Tensor,
    batch: Batch,
    rope: Rope,
    cache: KVCache,
    per_layer_inputs: Tensor | None = None,
) -> Tensor:
    """Run `blocks` on the residual stream x [1, T, hidden], product by product.

    per_layer_inputs: [1, T, layers, width].
    """
    clear_new_states(batch.chunks, cache.states)
    context = pass_context(batch, rope, cache, per_layer_inputs)
    for block in blocks:
        x = block(x, context)
    return x


def pass_context(batch: Batch, rope: Rope, cache: KVCache, per_layer_inputs: Tensor | None) -> PassContext:
    """Return what the layers share in a pass over `batch`; per_layer_inputs: [1, T, layers, width]."""

    def inputs_of(layer: int) -> Tensor:
        assert per_layer_inputs is not None
        return per_layer_inputs[..., layer, :]

    states = BatchStates(batch, cache.states)
    return PassContext(rope.rows(batch.chunks), PagedAttention(batch, cache, rope.portable), inputs_of, states)
