"""Second moments of the inputs of a block's linears, collected while calibration tokens pass through it.

Nothing is padded, so every token counts, and counts once. What a token went through already is kept, so that nothing is
computed again that did not change. Knows blocks and their inputs, nothing of what is solved.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mycli.quant.layer_streaming import Sides, StreamedModel
from mycli.quant.rounding.error_compensation import Moments
from mycli.runtime.device.system import trim
from mycli.runtime.errors import ModelError
from mycli.runtime.layers.block import Block, PassContext, complete

HELD = 8  # every so many windows, one is kept apart to judge by


class BlockState:
    """A block and the residual streams [windows, context, hidden], on the host, that enter its parts.

    Where the block is `settled`, its weights are final: there is one stream, moved on in place as products are
    observed, which has left the block when the last was. Otherwise each part has a stream of its own, filled as its
    first product is observed.
    """

    def __init__(self, block: Block, stream: Tensor, settled: bool = False, sides: Sides | None = None) -> None:
        self.block = block
        self.settled = settled
        self._sides = sides
        others = [stream if settled else torch.empty_like(stream) for _ in block.parts[1:]]
        self.streams = [stream, *others]

    def beside(self, context: PassContext, rows: slice) -> PassContext:
        """`context` with what goes along with the stream of the windows `rows`."""
        return context if self._sides is None else self._sides.beside(context, rows)

    def part(self, product: str) -> int:
        """Which part `product` is in."""
        linear = self.block.products[product]
        return next(index for index, part in enumerate(self.block.parts) if linear in part.products)


@contextmanager
def rough_products(device: torch.device) -> Iterator[None]:
    """fp32 products of inputs rounded to bf16 (CPU) or TF32 (CUDA), summed in fp32: several times as fast.

    Good for what calibration tokens give: their sampling error is far larger (docs/quantization.md).
    """
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    before = backend.matmul.fp32_precision
    backend.matmul.fp32_precision = "tf32" if device.type == "cuda" else "bf16"
    try:
        yield
    finally:
        backend.matmul.fp32_precision = before


def require_finite(activations: Tensor) -> None:
    """Raises ModelError for NaN or infinity."""
    low, high = torch.aminmax(activations)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise ModelError("activations are NaN or infinite", code="other-calibration-text")


@torch.inference_mode()
def inputs(state: BlockState, product: str, rows: slice, context: PassContext, device: torch.device) -> Tensor:
    """What `product` of the block gets for the windows `rows`: [windows, context, K].

    Products must be asked for in order of execution: a part goes on from the stream that the first product of it left.
    """
    context = state.beside(context, rows)
    linear, index = state.block.products[product], state.part(product)
    part, streams = state.block.parts[index], state.streams
    if linear is part.products[0] and index > 0 and not state.settled:
        x = streams[index - 1][rows].to(device)
        streams[index][rows] = complete(state.block.parts[index - 1].steps(x, context)).to(streams[index].device)
    steps = part.steps(streams[index][rows].to(device), context)
    current, given = next(steps)
    while current is not linear:
        current, given = steps.send(current(given))
    if state.settled and linear is part.products[-1]:
        streams[index][rows] = complete(steps, linear(given)).to(streams[index].device)
    return given


@torch.inference_mode()
def leave(model: StreamedModel, state: BlockState, context: PassContext) -> None:
    """Move the stream out of a block whose weights have become final since the last part was entered."""
    stream, last_part = state.streams[0], state.block.parts[-1]
    for rows in model.batches(stream):
        x = state.streams[-1][rows].to(model.placement.device)
        stream[rows] = complete(last_part.steps(x, state.beside(context, rows))).to(stream.device)


@torch.inference_mode()
def observe(
    model: StreamedModel, quantized: BlockState, original: BlockState | None, product: str, context: PassContext
) -> tuple[Moments, Moments]:
    """Moments of what `product` gets in both models: of most windows, and of the windows held apart.

    Without `original` there is no drift. Raises ModelError that names the layer and the windows where activations are
    not finite.
    """
    linear = quantized.block.products[product]
    device = model.placement.device
    fitted, held = (Moments.zeros(linear.in_features, device) for _ in range(2))
    for rows in model.batches(quantized.streams[0]):
        with rough_products(device):
            x = inputs(quantized, product, rows, context, device).float()
            y = x if original is None else inputs(original, product, rows, context, device).float()
        try:
            require_finite(x)
            require_finite(y)
        except ModelError as error:
            windows = f"calibration windows {rows.start} to {rows.stop - 1}"
            raise error.reworded(f"{linear.specs[0].name}: {error.message} in {windows}") from None
        apart = torch.arange(rows.start, rows.stop) % HELD == HELD - 1
        with rough_products(device):
            for moments, chosen in ((fitted, ~apart), (held, apart)):
                moments.add(x[chosen].flatten(0, 1), y[chosen].flatten(0, 1))
    del x, y
    trim(apart=4 << 20)  # matrices of quite other sizes will be made, few of them, and large
    return fitted, held
