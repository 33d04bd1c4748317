"""A model of which one layer at a time is in memory: many tokens pass through each layer before the next is read.

What is held is the embedding, the head, one block, and the residual stream of the tokens on the host; so a model larger
than memory can be measured. Knows nothing of what the outputs are for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from mycli.quant.progress import Progress, silent
from mycli.runtime.attention import visible
from mycli.runtime.checkpoint import Checkpoint
from mycli.runtime.config import LinearSpec
from mycli.runtime.device import Placement
from mycli.runtime.manifest import Manifest
from mycli.runtime.packing import describe
from mycli.runtime.rope import Rope
from mycli.runtime.transformer import Block, Masks, Transformer

TOKENS_AT_ONCE = 4096  # through one layer: enough to be bound by arithmetic, few enough for its activations to be small

Surroundings = tuple[tuple[Tensor, Tensor], Masks]  # the rotary tables and masks that `Block.forward` takes


def batches(stream: Tensor) -> Iterator[Tensor]:
    """Views of `stream` [windows, context, hidden], of whole windows and about `TOKENS_AT_ONCE` tokens each."""
    return iter(torch.split(stream, max(1, TOKENS_AT_ONCE // stream.shape[1])))


class StreamedModel:
    """The model of a folder on a placement. Raises ModelError for anything the files and the config disagree on."""

    def __init__(self, folder: Path, placement: Placement) -> None:
        self.folder = folder
        self.placement = placement
        self.config, self.packings = describe(folder)
        manifest = Manifest.open(folder)
        manifest.check(self.config, self.packings)
        self._checkpoint = Checkpoint(manifest)
        # Without blocks a Transformer is the embedding, the last norm and the head, tied or not.
        self._ends = Transformer(replace(self.config, layers=0))
        self._ends.load(self._checkpoint, self.packings, placement.device, placement.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [windows, context] to the residual stream [windows, context, hidden], on the host."""
        return functional.embedding(tokens.to(self._ends.device), self._ends.embedding).cpu()

    def block(self, layer: int) -> Block:
        """One layer, read now; let go of it before the next."""
        block = Block(self.config, layer)
        block.load(self._checkpoint, self.packings, self.placement.device, self.placement.dtype)
        return block

    def stored_dtype(self, name: str) -> torch.dtype:
        """Of a tensor in the file."""
        return self._checkpoint.dtype(name)

    def weights(self, specs: Sequence[LinearSpec]) -> dict[str, Tensor]:
        """The weights of unquantized linears by name, read now, on the device in their stored dtype."""
        device = self.placement.device
        return {spec.name: self._checkpoint.read(f"{spec.name}.weight").to(device) for spec in specs}

    def surroundings(self, context: int) -> Surroundings:
        """The rotary tables and masks that `Block.forward` takes, for windows of `context` tokens."""
        device = self.placement.device
        windows = {self.config.window(layer) for layer in range(self.config.layers)}
        masks = {window: visible(0, context, window, device) for window in windows}
        return Rope(self.config, context, device, self.placement.dtype).tables(0, context), masks

    @torch.inference_mode()
    def hidden(self, tokens: Tensor, progress: Progress = silent) -> Tensor:
        """The residual stream after the last block for int64 [windows, context], on the host."""
        surroundings = self.surroundings(tokens.shape[1])
        stream = self.embed(tokens)
        for layer in range(self.config.layers):
            self.advance(self.block(layer), stream, surroundings)
            progress("layers", layer + 1, self.config.layers)
        return stream

    @torch.inference_mode()
    def advance(self, block: Block, stream: Tensor, surroundings: Surroundings) -> None:
        """Put `stream` [windows, context, hidden] through one layer, in place."""
        for part in batches(stream):
            part.copy_(block(part.to(self.placement.device), *surroundings, None))

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        """What the head sees of the residual stream after the last block: same shape, on the device."""
        normed: Tensor = self._ends.norm(hidden.to(self.placement.device))
        return normed

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [rows, vocabulary] on the device for rows [rows, hidden] of the residual stream after the last block."""
        logits: Tensor = self._ends.head(self._ends.norm(hidden.to(self.placement.device)))
        return logits.float()
