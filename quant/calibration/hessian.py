"""Second moments of the inputs of a block's linears, collected while calibration tokens pass through it.

Nothing is padded, so every token counts, and counts once. What a token went through already is kept, so that nothing is
computed again that did not change. Knows blocks and their inputs, nothing of what is solved.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mycli.quant.layer_streaming import Sides, StreamedModel
from mycli.quant.rounding.error_compensation import Moments
from mycli.runtime.device.system import trim_heap
from mycli.runtime.errors import ModelError
from mycli.runtime.kernels.routed import Route
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.feed_forward import Experts
from mycli.runtime.layers.layer_part import PassContext, Steps, complete
from mycli.runtime.layers.linear import Linear, RoutedProduct

HELD = 8  # every so many windows, one is kept apart to judge by
INPUTS_A_TOKEN = 8  # what fewer tokens than one for so many inputs have in common is their own, not the expert's


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
        self.routes: dict[int, Route] = {}  # of the experts, by the first window of a batch

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
    if not activations.numel():
        return
    low, high = torch.aminmax(activations)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise ModelError("activations are NaN or infinite", code="other-calibration-text")


class Observed(NamedTuple):
    """Moments of the windows to fit to and of those held apart; `few`: of an expert that got fewer tokens than one for
    `INPUTS_A_TOKEN` inputs."""

    fitted: Moments
    held: Moments
    few: bool


@dataclass(frozen=True)
class Given:
    """What a product gets: `x` [windows, context, K] of all tokens, or, of an expert, [n, K] of `tokens`.

    tokens: int [n], counted through the windows; None for all of them.
    """

    x: Tensor
    tokens: Tensor | None = None


@torch.no_grad()
def inputs(
    state: BlockState,
    product: str,
    rows: slice,
    context: PassContext,
    device: torch.device,
    tokens: Tensor | None = None,
) -> Given:
    """What `product` of the block gets for the windows `rows`.

    Products must be asked for in order of execution: a part goes on from the stream that the first product of it left.
    An expert gets the tokens that are routed to it, or those of another model's, `tokens`.
    """
    context = state.beside(context, rows)
    linear, index = state.block.products[product], state.part(product)
    part, streams = state.block.parts[index], state.streams
    if linear is part.products[0] and index > 0 and not state.settled:
        x = streams[index - 1][rows].to(device)
        streams[index][rows] = complete(state.block.parts[index - 1].steps(x, context)).to(streams[index].device)
        state.routes.pop(rows.start, None)
    x = streams[index][rows].to(device)
    if isinstance(part, Experts) and (expert := part.expert_of(linear)) is not None:
        if tokens is None:
            if rows.start not in state.routes:
                state.routes[rows.start] = _to_experts(part.steps(x, context))[0].route
            tokens = state.routes[rows.start].of(expert)
        given = Given(_expert_inputs(part, linear, x.flatten(0, 1)[tokens], context), tokens)
        finished = None
    else:
        steps = part.steps(x, context)
        current, found = next(steps)
        while current is not linear:
            current, found = steps.send(current(found))
        given, finished = Given(found), steps
    if state.settled and linear is part.products[-1]:
        left = complete(part.steps(x, context)) if finished is None else complete(finished, linear(given.x))
        streams[index][rows] = left.to(streams[index].device)
    return given


def _to_experts(steps: Steps) -> tuple[RoutedProduct, Tensor]:
    """The first product of the experts in a part, and its input; what is before it goes by other ways, and is 0."""
    product, x = next(steps)
    while not isinstance(product, RoutedProduct):
        product, x = steps.send(x.new_zeros(*x.shape[:-1], product.out_features))
    return product, x


def _expert_inputs(part: Experts, linear: Linear, x: Tensor, context: PassContext) -> Tensor:
    """What one linear of an expert gets of the residual streams x [n, hidden] of tokens that all go to this expert."""
    steps = part.steps(x.unsqueeze(0), context)
    product, given = _to_experts(steps)
    expert = part.expert_of(linear)
    assert expert is not None
    first = product.linears[expert]
    return given if first is linear else steps.send(first(given))[1]


@torch.no_grad()
def leave(model: StreamedModel, state: BlockState, context: PassContext) -> None:
    """Move the stream out of a block whose weights have become final since the last part was entered."""
    stream, last_part = state.streams[0], state.block.parts[-1]
    for rows in model.batches(stream):
        x = state.streams[-1][rows].to(model.placement.device)
        stream[rows] = complete(last_part.steps(x, state.beside(context, rows))).to(stream.device)


@torch.no_grad()
def observe(
    model: StreamedModel, quantized: BlockState, original: BlockState | None, product: str, context: PassContext
) -> Observed:
    """What `product` gets in both models, of most windows and of the windows held apart.

    Without `original` there is no drift. An expert is shown the tokens that the quantized model routes to it. Raises
    ModelError that names the layer and the windows where activations are not finite.
    """
    linear = quantized.block.products[product]
    device, count = model.placement.device, None
    fitted, held = (Moments.zeros(linear.in_features, device) for _ in range(2))
    for rows in model.batches(quantized.streams[0]):
        with rough_products(device):
            given = inputs(quantized, product, rows, context, device)
            x = y = given.x.float()
            if original is not None:
                y = inputs(original, product, rows, context, device, given.tokens).x.float()
        try:
            require_finite(x)
            require_finite(y)
        except ModelError as error:
            windows = f"calibration windows {rows.start} to {rows.stop - 1}"
            raise error.with_message(f"{linear.specs[0].name}: {error.message} in {windows}") from None
        window = torch.arange(rows.start, rows.stop, device=device)
        if given.tokens is not None:
            count = (count or 0) + len(given.tokens)
            window = window[given.tokens // quantized.streams[0].shape[1]]
        apart = window % HELD == HELD - 1
        with rough_products(device):
            for moments, chosen in ((fitted, ~apart), (held, apart)):
                moments.add(x[chosen].flatten(0, -2), y[chosen].flatten(0, -2))
    del x, y
    trim_heap(mmap_threshold=4 << 20)  # matrices of quite other sizes will be made, few of them, and large
    return Observed(fitted, held, count is not None and count < linear.in_features / INPUTS_A_TOKEN)
