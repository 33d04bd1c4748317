"""Runs a model with one layer in memory: all tokens pass through a layer before the next one is read."""

from collections.abc import Callable, Mapping, Sequence
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
from mycli.runtime.device.system import reuse_freed_memory, trim_heap
from mycli.runtime.engine.loading.activations import activation_choice
from mycli.runtime.layers.attention import PromptAttention, SharedKeyValues
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.layer_part import PassContext
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.per_layer import PerLayerInputs
from mycli.runtime.layers.positions import PositionEmbeddings
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.streams import Streams
from mycli.runtime.layers.vocabulary import finish_logits, scale_embeddings
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec

_EMBEDDING = f"{EMBEDDING}.weight"


def tokens_at_once(gpu: bool) -> int:
    """Return the tokens that pass through a layer at a time."""
    # Enough to be bound by arithmetic; on a CPU few enough that malloc reuses the same memory.
    return 8192 if gpu else 1024


class SideInputs:
    """The per-layer embeddings, and the keys and values shared between layers, that go with a residual stream."""

    def __init__(self, model: "StreamedModel", tokens: Tensor) -> None:
        self._model = model
        self._shared: dict[int, SharedKeyValues] = {}
        config = model.config
        self._per_layer = PerLayerInputs(config) if config.per_layer_width else None
        if self._per_layer is not None:
            # Only the rows of tokens that occur, in their stored dtype: whole tables may exceed the rest of the model.
            occurring, self._rows = torch.unique(tokens, return_inverse=True)
            self._embedding = model.source.read(_EMBEDDING)[occurring]
            self._table = model.source.read(f"{config.per_layer_table().name}.weight")[self._per_layer.rows(occurring)]
            self._projection = model.source.read(f"{config.per_layer_projection().name}.weight")
            self._per_layer.norm.load(model.stored_weights)

    def twin(self) -> "SideInputs":
        twin = copy(self)
        twin._shared = {}
        return twin

    def shared(self, windows: slice) -> SharedKeyValues:
        """The keys and values that layers share, of a batch of windows."""
        return self._shared.setdefault(windows.start, {})

    def shared_by_window(self, windows: Tensor, layer: LayerSpec) -> SharedKeyValues:
        """The keys and values that `layer` reads from another layer, for any windows, int64 [count]."""
        source = layer.kv_source
        if source is None:
            return {}
        keys, values = list[Tensor](), list[Tensor]()
        for window in windows.tolist():
            first = max(start for start in self._shared if start <= window)  # of the batch
            key, value = self._shared[first][source]
            keys.append(key.data[window - first])
            values.append(value.data[window - first])
        return {source: (Stored(torch.stack(keys)), Stored(torch.stack(values)))}

    def add_to(self, context: PassContext, windows: slice) -> PassContext:
        """`context` with the side inputs of a batch of windows; batches must be the same for every layer."""
        return self.joined(context, windows, self.shared(windows))

    def joined(self, context: PassContext, windows: slice | Tensor, shared: SharedKeyValues) -> PassContext:
        """`context` with the per-layer embeddings of windows; layers read and add keys and values in `shared`."""
        per_layer = (
            None if self._per_layer is None else partial(self._layer_input, self._per_layer, self._rows[windows])
        )
        assert isinstance(context.attention, PromptAttention)
        return replace(context, per_layer_inputs=per_layer, attention=context.attention.with_shared(shared))

    def _layer_input(self, per_layer: PerLayerInputs, rows: Tensor, layer: int) -> Tensor:
        config, placement = self._model.config, self._model.placement
        width = slice(layer * config.per_layer_width, (layer + 1) * config.per_layer_width)
        embedded, table, projection = (
            part.to(placement.device, placement.dtype)
            for part in (self._embedding[rows], self._table[:, width][rows], self._projection[width])
        )
        return per_layer.join(table, functional.linear(scale_embeddings(embedded, config), projection))


class StreamedModel:
    """The model of a folder; about `at_once` tokens pass through a layer at a time, whole windows, at least one.

    `dense`: blocks are dequantized when they are read, so that their weights can be changed.
    """

    def __init__(
        self, folder: ModelFolder, placement: Placement, at_once: int | None = None, *, dense: bool = False
    ) -> None:
        self.at_once = at_once or tokens_at_once(placement.device.type == "cuda")
        self.folder = folder
        self.placement = placement
        self.config, self.packings = folder.config, folder.packings
        self.activations = None if dense else activation_choice(folder, placement)
        if self.activations is not None:
            self.packings = self.activations.packings(self.packings)
        self.source = SourceWeights(folder, placement.dtype)
        self.stored_weights = CheckpointWeights(
            self.source.checkpoint, self.packings, placement.device, placement.dtype
        )
        self._dense = dense
        self._norm = self.final_norm()
        self.streams = Streams(self.config) if self.config.streams > 1 else None
        if self.streams is not None:
            self.streams.load(self.stored_weights)
        self.positions = PositionEmbeddings(self.config.positions) if self.config.positions is not None else None
        if self.positions is not None:
            self.positions.load(self.stored_weights)
        self._head: Linear | None = None

    def embed(self, tokens: Tensor, table: Tensor | None = None) -> Tensor:
        """The residual stream [windows, context, hidden] of tokens int64 [windows, context], on the host.

        `table`: an embedding to use instead of the model's own.
        """
        table = self.source.read(_EMBEDDING) if table is None else table
        hidden = self.config.hidden_size
        stream = torch.empty(*tokens.shape, self.config.stream_width, dtype=self.placement.dtype)
        positions = torch.arange(tokens.shape[1], device=self.placement.device)
        for window, ids in zip(stream, tokens, strict=True):
            window[:, :hidden].copy_(functional.embedding(ids, table))
            window[:, :hidden].copy_(scale_embeddings(window[:, :hidden], self.config))
            if self.positions is not None:
                window.copy_(self.positions.add_positions(window.to(self.placement.device), positions))
            if self.streams is not None:
                window.copy_(self.streams.enter(window[:, :hidden].to(self.placement.device)))
        return stream

    def final_norm(self) -> RMSNorm:
        norm = RMSNorm(self.config.norm())
        norm.load(self.stored_weights)
        return norm

    def share_head(self, other: "StreamedModel") -> None:
        self._head = other.head

    @property
    def head(self) -> Linear:
        """The output head, read on first use and then resident."""
        if self._head is None:
            self._head = Linear((self.config.head(),))
            if self.config.tie_embeddings:
                table = self.source.read(_EMBEDDING).to(self.placement.device, self.placement.dtype)
                self._head.replace(table)
            else:
                self._head.load(self.stored_weights)
        return self._head

    def block(self, layer: int) -> Block:
        """Read a layer; drop it before reading the next."""
        block = Block(self.config.layer(layer))
        block.load(self.stored_weights)
        if self._dense and self.packings:
            for linear in block.products.values():
                linear.replace(linear.weight().to(self.placement.dtype))
        block.keep_prompt_copies(self.placement.prompt_copy, self.placement.dtype)
        return block

    def prefetch(self, layer: int) -> None:
        """Ask the operating system to read a layer ahead; does not wait and never fails."""
        for name, _ in self.config.layer(layer).tensors():
            self.source.checkpoint.prefetch(name)

    def batches(self, stream: Tensor) -> list[slice]:
        """Split the windows of `stream` [windows, context, hidden] into batches of about `at_once` tokens."""
        windows, context, _ = stream.shape
        step = max(1, self.at_once // context)
        return [slice(start, min(start + step, windows)) for start in range(0, windows, step)]

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor in the file, or of its dequantized values if it is packed."""
        return self.source.dtype(name)

    def weights(self, specs: Sequence[LinearSpec]) -> dict[str, Tensor]:
        """Read the dense weights of linears by name, on the device, in their stored dtype."""
        device = self.placement.device
        return {spec.name: self.source.read(f"{spec.name}.weight").to(device) for spec in specs}

    def context(self, tokens: int, *, exact: bool = False) -> PassContext:
        """The context of a pass over windows of `tokens` tokens; `exact`: keys and values are not rounded."""
        rope = Rope(self.config, tokens, self.placement.device, self.placement.dtype)
        dtype = None if exact else cache_dtype(self.placement.kv, self.placement.dtype)
        return PassContext(rope.tables(0, tokens), PromptAttention(dtype))

    def side_inputs(self, tokens: Tensor) -> SideInputs | None:
        return SideInputs(self, tokens) if self.config.has_side_inputs else None

    @torch.no_grad()
    def hidden(self, tokens: Tensor, progress: ReportProgress = silent) -> Tensor:
        """The residual stream after the last block for int64 [windows, context], on the host."""
        context = self.context(tokens.shape[1])
        stream, side_inputs = self.embed(tokens), self.side_inputs(tokens)
        progress("layers", 0, self.config.layers)
        for layer in range(self.config.layers):
            self.advance(self.block(layer), stream, context, side_inputs)
            progress("layers", layer + 1, self.config.layers)
        return stream

    @torch.no_grad()
    def advance(
        self, block: Block, stream: Tensor, context: PassContext, side_inputs: SideInputs | None = None
    ) -> None:
        """Run `stream` [windows, context, hidden] through a layer, in place."""
        reuse_freed_memory()
        for windows in self.batches(stream):
            batch = context if side_inputs is None else side_inputs.add_to(context, windows)
            stream[windows].copy_(block(stream[windows].to(self.placement.device), batch))
        trim_heap()

    def normed(self, hidden: Tensor) -> Tensor:
        hidden = hidden.to(self.placement.device)
        normed: Tensor = self._norm(hidden if self.streams is None else self.streams.leave(hidden))
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits fp32 [rows, vocabulary] on the device; `hidden` [rows, hidden]: the last block's output."""
        return finish_logits(self.head(self.normed(hidden)), self.config)

    def head_gradient(self, stream: Tensor, loss: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Return the gradient fp32 of a loss with respect to `stream` [windows, tokens, hidden]."""
        # `stream` is the last block's output; `loss` gets the index of a window and its scores [tokens, vocabulary].
        gradient = torch.empty(stream.shape)
        for index, hidden in enumerate(stream):
            x = hidden.clone().to(self.placement.device).requires_grad_()
            (slope,) = torch.autograd.grad(loss(index, self.logits(x).log_softmax(1)), x)
            gradient[index] = slope.to(gradient)
        return gradient


class RememberedModel(StreamedModel):
    """A model that runs the same tokens once and remembers the result, for comparing several others with it.

    `twice`: the result is dropped when it is returned for the second time.
    """

    def __init__(self, folder: ModelFolder, placement: Placement, at_once: int | None, *, twice: bool = False) -> None:
        super().__init__(folder, placement, at_once)
        self._twice = twice
        self._streams: dict[bytes, Tensor] = {}

    def hidden(self, tokens: Tensor, progress: ReportProgress = silent) -> Tensor:
        key = tokens.numpy().tobytes()
        if key in self._streams:
            return self._streams.pop(key) if self._twice else self._streams[key]
        return self._streams.setdefault(key, super().hidden(tokens, progress))


def restore(block: Block, changed: Mapping[str, Tensor]) -> None:
    """Put changed gains and biases by name, from a transform or from tuning, into a block."""
    for norm in block.norms:
        if (gain := changed.get(norm.tensor)) is not None:
            norm.replace(gain)
        if (bias := changed.get(norm.spec.bias_tensor)) is not None and norm.bias is not None:
            norm.bias = bias.to(norm.bias)
    for linear in block.products.values():
        start = 0
        for spec in linear.specs:
            end = start + spec.out_features
            if (bias := changed.get(f"{spec.name}.bias")) is not None and linear.bias is not None:
                linear.bias[start:end] = bias.to(linear.bias)
            start = end
