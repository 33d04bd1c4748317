"""Second moments of the inputs of a block's linears, collected while calibration windows pass through the block.

Windows are never padded: every token counts once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mycli.quant.layer_streaming import SideInputs, StreamedModel
from mycli.quant.rounding.error_compensation import Moments
from mycli.runtime.device.system import reuse_freed_memory, trim_heap
from mycli.runtime.errors import ModelError
from mycli.runtime.kernels.cpu.rounded import is_rounding
from mycli.runtime.kernels.routed import Route
from mycli.runtime.layers.block import Block, Parallel
from mycli.runtime.layers.feed_forward import Experts
from mycli.runtime.layers.layer_part import LayerPart, PassContext, Steps, complete
from mycli.runtime.layers.linear import Linear, RoutedProduct
from mycli.runtime.layers.norm import normed

HELD_OUT_EVERY = 8  # one window in eight decides, the others are fitted to
# An expert with fewer tokens than a share of its inputs is only rounded: what so few tokens have in common says more
# about them than about the expert.
INPUTS_PER_TOKEN = 8


class ObservedBlock:
    """A block, and the residual streams [windows, context, hidden] on the host that enter its parts."""

    # A block with `final` weights has one stream, advanced in place as products are observed: it has left the block
    # after the last one. Otherwise each part has its own stream, filled when its first product is observed, so that
    # nothing unchanged is computed again.

    def __init__(
        self,
        block: Block,
        stream: Tensor,
        final: bool = False,
        side_inputs: SideInputs | None = None,
        keeps: bool = False,
    ) -> None:
        """`keeps`: there is memory for the inputs of the last product of a part, which change no result."""
        self.block = block
        self.final = final
        self._side_inputs, self._keeps = side_inputs, keeps
        others = [stream if final else torch.empty_like(stream) for _ in block.parts[1:]]
        self.streams = [stream, *others]
        self.routes: dict[int, Route] = {}  # of the experts, by the first window of a batch
        self._early_routes: dict[int, Route] = {}  # those of a router that reads the layer's input
        # Inputs of the last product of a part: what leads to it runs once. In bf16, as reduced precision rounds them.
        self._kept: tuple[int, Tensor] | None = None

    def context(self, shared: PassContext, windows: slice) -> PassContext:
        """Return the context of a batch of windows; first called before the batch leaves the first part."""
        context = shared if self._side_inputs is None else self._side_inputs.add_to(shared, windows)
        if not self.block.early_router:
            return context
        if windows.start not in self._early_routes:
            entering = self.streams[0][windows].to(self.block.norms[0].weight.device)
            route = self.block.routed(entering, context).route
            assert route is not None
            self._early_routes[windows.start] = route
        return replace(context, route=self._early_routes[windows.start])

    def keep(self, index: int, windows: slice, x: Tensor) -> None:
        """Keep the input of the last product of a part, if products round it."""
        part = self.block.parts[index]
        if self.final or not self._keeps or not (isinstance(part, LayerPart) and part.sums_last_product):
            return
        if not x.is_cpu or x.dtype != torch.float32 or not is_rounding():
            return
        if self._kept is None or self._kept[0] != index:
            self._kept = index, torch.empty(*self.streams[0].shape[:2], x.shape[-1], dtype=torch.bfloat16)
        self._kept[1][windows] = x

    def left(self, index: int, windows: slice, x: Tensor, context: PassContext) -> Tensor:
        """The residual stream after a part whose products are final, for the one before it."""
        part = self.block.parts[index]
        if self._kept is None or self._kept[0] != index or not isinstance(part, LayerPart):
            return complete(part.steps(x, context))
        return part.sum(x, part.products[-1](self._kept[1][windows].float()))


@contextmanager
def reduced_precision(device: torch.device) -> Iterator[None]:
    """Round the inputs of fp32 products to bf16 (CPU) or TF32 (CUDA), several times as fast; sums stay fp32."""
    # Precise enough: the sampling error of calibration is far larger (docs/quantization.md).
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    before = backend.matmul.fp32_precision
    backend.matmul.fp32_precision = "tf32" if device.type == "cuda" else "bf16"
    try:
        yield
    finally:
        backend.matmul.fp32_precision = before


def require_finite(activations: Tensor) -> None:
    if not activations.numel():
        return
    low, high = torch.aminmax(activations)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise ModelError("activations are NaN or infinite", code="other-calibration-text")


class Observed(NamedTuple):
    """Moments of the fitted and of the held-out windows; `too_few`: an expert got too few tokens to be solved."""

    fitted: Moments
    held_out: Moments
    too_few: bool


@dataclass(frozen=True)
class ProductInput:
    """The input of a product: `x` [windows, context, K], or for an expert [n, K] of `tokens`."""

    x: Tensor
    tokens: Tensor | None = None  # int [n], indices into the flattened windows


@torch.no_grad()
def product_input(
    state: ObservedBlock,
    product: str,
    windows: slice,
    context: PassContext,
    device: torch.device,
    tokens: Tensor | None = None,
) -> ProductInput:
    """The input of `product` for a batch of windows, called in order of execution; an expert gets `tokens` if given."""
    context = state.context(context, windows)
    linear, parts, streams = state.block.products[product], state.block.parts, state.streams
    index = next(index for index, part in enumerate(parts) if linear in part.products)
    part = parts[index]
    if linear is part.products[0] and index > 0 and not state.final:
        x = streams[index - 1][windows].to(device)
        streams[index][windows] = state.left(index - 1, windows, x, context).to(streams[index].device)
        state.routes.pop(windows.start, None)
    x = streams[index][windows].to(device)
    mlp = part.other if isinstance(part, Parallel) else part
    experts = mlp if isinstance(mlp, Experts) and linear in mlp.products else None
    if experts is not None and (expert := experts.expert_of(linear)) is not None:
        entering = normed(part.attention.norm, x) if isinstance(part, Parallel) else x
        if tokens is None:
            if windows.start not in state.routes:
                state.routes[windows.start] = _to_experts(experts.steps(entering, context))[0].route
            tokens = state.routes[windows.start].of(expert)
        result = ProductInput(_expert_input(experts, linear, entering.flatten(0, 1)[tokens], context), tokens)
        remaining = None
    else:
        steps = part.steps(x, context)
        current, value = next(steps)
        while current is not linear:
            current, value = steps.send(current(value))
        result, remaining = ProductInput(value), steps
    if linear is part.products[-1] and tokens is None and remaining is not None:
        state.keep(index, windows, result.x)
    if state.final and linear is part.products[-1]:
        left = complete(part.steps(x, context)) if remaining is None else complete(remaining, linear(result.x))
        streams[index][windows] = left.to(streams[index].device)
    return result


def _to_experts(steps: Steps) -> tuple[RoutedProduct, Tensor]:
    product, x = next(steps)
    while not isinstance(product, RoutedProduct):
        # Products before it do not reach the experts' input: their outputs may be anything.
        product, x = steps.send(x.new_zeros(*x.shape[:-1], product.out_features))
    return product, x


def _expert_input(part: Experts, linear: Linear, x: Tensor, context: PassContext) -> Tensor:
    """The input of one linear of an expert for residual streams x [n, hidden] of tokens routed to this expert."""
    if part.spec.weigh_inputs:  # by this expert's own weight: another model may route the tokens elsewhere
        return part.weighted_input(linear, x)
    steps = part.steps(x.unsqueeze(0), context)
    product, value = _to_experts(steps)
    expert = part.expert_of(linear)
    assert expert is not None
    first = product.linears[expert]
    return value if first is linear else steps.send(first(value))[1]


@torch.no_grad()
def finish_block(model: StreamedModel, state: ObservedBlock, context: PassContext) -> None:
    """Advance the stream out of a block whose weights became final after the last part was entered."""
    stream, last = state.streams[0], len(state.block.parts) - 1
    reuse_freed_memory()
    for windows in model.batches(stream):
        x = state.streams[-1][windows].to(model.placement.device)
        stream[windows] = state.left(last, windows, x, state.context(context, windows)).to(stream.device)
    trim_heap()


def observe(
    model: StreamedModel,
    quantized: ObservedBlock,
    original: ObservedBlock | None,
    product: str,
    context: PassContext,
) -> Observed:
    """The moments of a product's inputs in the quantized model, and their drift from the original if it is given.

    Raises ModelError, with the layer and the windows, for activations that are not finite.
    """
    return observe_each(model, [CopyInput(quantized)], original, product, context)[0]


class CopyInput(NamedTuple):
    """A quantized block to observe; `scale` [K]: the factors of its inputs to those of the original are 1 / scale."""

    block: ObservedBlock
    scale: Tensor | None = None


@torch.no_grad()
def observe_each(
    model: StreamedModel,
    subjects: Sequence[CopyInput],
    original: ObservedBlock | None,
    product: str,
    context: PassContext,
) -> list[Observed]:
    """Observe several copies of a block as `observe` does; the original runs once for all.

    Only one copy of a mixture can be observed at a time: its router decides which tokens of the original count.
    """
    sums = [_Sums.of(subject, product, model, original is not None) for subject in subjects]
    reuse_freed_memory()
    for windows in model.batches(subjects[0].block.streams[0]):
        y = None
        for subject, total in zip(subjects, sums, strict=True):
            with reduced_precision(model.placement.device):
                value = product_input(subject.block, product, windows, context, model.placement.device)
                if original is not None and (y is None or value.tokens is not None):
                    y = product_input(original, product, windows, context, model.placement.device, value.tokens).x
            name = subject.block.block.products[product].specs[0].name
            try:
                total.add(value, _divided(y, subject.scale), windows)
            except ModelError as error:
                where = f"calibration windows {windows.start} to {windows.stop - 1}"
                raise error.with_message(f"{name}: {error.message} in {where}") from None
            del value
    del y
    results = [total.result() for total in sums]
    trim_heap(mmap_threshold=4 << 20)  # few and large matrices of other sizes follow
    return results


def _rows(x: Tensor, chosen: Tensor) -> Tensor:
    return (x if bool(chosen.all()) else x[chosen]).flatten(0, -2).contiguous()


def _divided(y: Tensor | None, scale: Tensor | None) -> Tensor | None:
    return y if y is None or scale is None else y / scale


class _Sums:
    """The moments of one copy's inputs, while batches of windows are added."""

    def __init__(self, size: int, weight: Tensor | None, device: torch.device, context: int) -> None:
        self._fitted, self._held_out = (Moments.zeros(size, device, weight) for _ in range(2))
        self._size, self._device, self._context = size, device, context
        self._count: int | None = None  # of the tokens of an expert

    @classmethod
    def of(cls, subject: CopyInput, product: str, model: StreamedModel, has_drift: bool) -> "_Sums":
        linear = subject.block.block.products[product]
        weight = linear.weight().float() if has_drift else None
        return cls(linear.in_features, weight, model.placement.device, subject.block.streams[0].shape[1])

    def add(self, value: ProductInput, original: Tensor | None, windows: slice) -> None:
        x, y = value.x.float(), None if original is None else original.float()
        require_finite(x)
        if y is not None:
            require_finite(y)
        index = torch.arange(windows.start, windows.stop, device=self._device)
        if value.tokens is not None:
            self._count = (self._count or 0) + len(value.tokens)
            index = index[value.tokens // self._context]
        is_held_out = index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        with reduced_precision(self._device):
            for moments, chosen in ((self._fitted, ~is_held_out), (self._held_out, is_held_out)):
                if bool(chosen.any()):
                    moments.add(_rows(x, chosen), None if y is None else _rows(y, chosen))

    def result(self) -> Observed:
        few = self._count is not None and self._count < self._size / INPUTS_PER_TOKEN
        return Observed(self._fitted.complete(), self._held_out.complete(), few)
