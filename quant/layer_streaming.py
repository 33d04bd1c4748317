"""A model of which one layer at a time is in memory: many tokens pass through each layer before the next is read.

What is held is one block, the residual stream of the tokens on the host, and at the end the head; so a model larger
than memory can be measured. Knows nothing of what the outputs are for.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from mycli.quant.progress import ReportProgress, silent
from mycli.quant.source_weights import SourceWeights
from mycli.runtime.cache.kv_cache import Stored, cache_dtype
from mycli.runtime.checkpoint.formats import EMBEDDING
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.layers.attention import PromptAttention
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.layer_part import PassContext
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.per_layer import PerLayerInputs
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.vocabulary import finish_logits, scale_embeddings
from mycli.runtime.models.part_spec import LinearSpec

# Through one layer: enough to be bound by arithmetic, few enough that memory is used again and not asked for anew.
TOKENS_AT_ONCE = 1024
TOKENS_ON_GPU = 8192

_TABLE = f"{EMBEDDING}.weight"


class Sides:
    """What goes along with a stream of windows from layer to layer, for families whose layers read more than it.

    That is what layers are told of the tokens, of which the rows that occur are kept as they are stored; and keys and
    values that layers lend to later ones. A second stream of the same windows has its own of these (`twin`).
    """

    def __init__(self, model: "StreamedModel", tokens: Tensor) -> None:
        self._model = model
        self._lent: dict[int, dict[int, tuple[Stored, Stored]]] = {}
        config = model.config
        self._per_layer = PerLayerInputs(config) if config.per_layer_width else None
        if self._per_layer is not None:
            occurring, self._places = torch.unique(tokens, return_inverse=True)
            self._embedding = model.source.read(_TABLE)[occurring]
            self._table = model.source.read(f"{config.per_layer_table().name}.weight")[occurring]
            self._projection = model.source.read(f"{config.per_layer_projection().name}.weight")
            self._per_layer.norm.load(model.source.checkpoint, model.placement.device, model.placement.dtype)

    def twin(self) -> "Sides":
        """For another stream of the same windows."""
        twin = copy(self)
        twin._lent = {}
        return twin

    def beside(self, context: PassContext, rows: slice) -> PassContext:
        """`context` for the windows `rows`, which are always cut alike."""
        told = None if self._per_layer is None else partial(self._told, self._per_layer, self._places[rows])
        assert isinstance(context.attention, PromptAttention)
        lent = self._lent.setdefault(rows.start, {})
        return replace(context, per_layer_inputs=told, attention=context.attention.with_shared(lent))

    def _told(self, per_layer: PerLayerInputs, places: Tensor, layer: int) -> Tensor:
        config, placement = self._model.config, self._model.placement
        width = slice(layer * config.per_layer_width, (layer + 1) * config.per_layer_width)
        embedded, table, projection = (
            part.to(placement.device, placement.dtype)
            for part in (self._embedding[places], self._table[:, width][places], self._projection[width])
        )
        return per_layer.join(table, functional.linear(scale_embeddings(embedded, config), projection))


class StreamedModel:
    """The model of a folder on a placement, `at_once` tokens at a time through a layer (whole windows, at least one).

    `dense`: packed weights of the blocks become dense when they are read, to be worked on.

    Raises ModelError for anything the files and the config disagree on.
    """

    def __init__(
        self, folder: ModelFolder, placement: Placement, at_once: int | None = None, *, dense: bool = False
    ) -> None:
        self.at_once = at_once or (TOKENS_ON_GPU if placement.device.type == "cuda" else TOKENS_AT_ONCE)
        self.folder = folder
        self.placement = placement
        self.config, self.packings = folder.config, folder.packings
        self.source = SourceWeights(folder)
        self._checkpoint, self._dense = self.source.checkpoint, dense
        self._norm = self.final_norm()
        self._head: Linear | None = None

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [windows, context] to the residual stream [windows, context, hidden], on the host."""
        table = self.source.read(_TABLE)
        stream = torch.empty(*tokens.shape, table.shape[1], dtype=self.placement.dtype)
        for window, ids in zip(stream, tokens, strict=True):
            window.copy_(functional.embedding(ids, table))
            window.copy_(scale_embeddings(window, self.config))
        return stream

    def final_norm(self) -> RMSNorm:
        """The norm after the last block, read now."""
        norm = RMSNorm(self.config.norm())
        norm.load(self._checkpoint, self.placement.device, self.placement.dtype)
        return norm

    def share_head(self, other: "StreamedModel") -> None:
        """Take the head of a model that has the same, so that it is in memory once."""
        self._head = other.head

    @property
    def head(self) -> Linear:
        """Read when it is first asked for, and kept: of `embed` and the blocks, nothing is."""
        if self._head is None:
            self._head = Linear((self.config.head(),))
            if self.config.tie_embeddings:
                table = self.source.read(_TABLE).to(self.placement.device, self.placement.dtype)
                self._head.replace(table)
            else:
                self._head.load(self._checkpoint, self.packings, self.placement.device, self.placement.dtype)
        return self._head

    def block(self, layer: int) -> Block:
        """One layer, read now; let go of it before the next."""
        block = Block(self.config.layer(layer))
        block.load(self._checkpoint, self.packings, self.placement.device, self.placement.dtype)
        if self._dense and self.packings:
            for linear in block.products.values():
                linear.replace(linear.weight().to(self.placement.dtype))
        return block

    def expect(self, layer: int) -> None:
        """Have the system read one layer's tensors already; nothing waits for it, and nothing fails by it."""
        for name, _ in self.config.layer(layer).tensors():
            self._checkpoint.prefetch(name)

    def batches(self, stream: Tensor) -> list[slice]:
        """Of the windows of `stream` [windows, context, hidden]: whole ones, about `at_once` tokens each."""
        windows, context, _ = stream.shape
        step = max(1, self.at_once // context)
        return [slice(start, min(start + step, windows)) for start in range(0, windows, step)]

    def stored_dtype(self, name: str) -> torch.dtype:
        """Of a tensor in the file, or of what it means where it is packed."""
        return self.source.dtype(name)

    def weights(self, specs: Sequence[LinearSpec]) -> dict[str, Tensor]:
        """The dense weights of linears by name, read now, on the device in their stored dtype."""
        device = self.placement.device
        return {spec.name: self.source.read(f"{spec.name}.weight").to(device) for spec in specs}

    def context(self, tokens: int, *, exact: bool = False) -> PassContext:
        """What layers share in a pass over windows of `tokens` tokens.

        Keys and values are rounded as the placement's cache rounds them, unless `exact`.
        """
        rope = Rope(self.config, tokens, self.placement.device, self.placement.dtype)
        dtype = None if exact else cache_dtype(self.placement.kv, self.placement.dtype)
        return PassContext(rope.tables(0, tokens), PromptAttention(dtype))

    def sides(self, tokens: Tensor) -> Sides | None:
        """What goes along with a stream of the windows int64 [windows, context]; None where layers read no more."""
        return Sides(self, tokens) if self.config.has_side_inputs else None

    @torch.no_grad()
    def hidden(self, tokens: Tensor, progress: ReportProgress = silent) -> Tensor:
        """The residual stream after the last block for int64 [windows, context], on the host."""
        context = self.context(tokens.shape[1])
        stream, sides = self.embed(tokens), self.sides(tokens)
        for layer in range(self.config.layers):
            self.advance(self.block(layer), stream, context, sides)
            progress("layers", layer + 1, self.config.layers)
        return stream

    @torch.no_grad()
    def advance(self, block: Block, stream: Tensor, context: PassContext, sides: Sides | None = None) -> None:
        """Put `stream` [windows, context, hidden] through one layer, in place; keys and values as the cache has
        them."""
        for rows in self.batches(stream):
            part, its = stream[rows], context if sides is None else sides.beside(context, rows)
            part.copy_(block(part.to(self.placement.device), its))

    def normed(self, hidden: Tensor) -> Tensor:
        """What the head sees of the residual stream after the last block: same shape, on the device."""
        normed: Tensor = self._norm(hidden.to(self.placement.device))
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [rows, vocabulary] on the device for rows [rows, hidden] of the residual stream after the last block."""
        return finish_logits(self.head(self.normed(hidden)), self.config)


def restore(block: Block, changed: Mapping[str, Tensor]) -> None:
    """Put gains and biases by name, of a transform or of tuning, into a block as it was read."""
    for norm in block.norms:
        if (gain := changed.get(norm.tensor)) is not None:
            norm.replace(gain)
    for linear in block.products.values():
        start = 0
        for spec in linear.specs:
            end = start + spec.out_features
            if (bias := changed.get(f"{spec.name}.bias")) is not None and linear.bias is not None:
                linear.bias[start:end] = bias.to(linear.bias)
            start = end
