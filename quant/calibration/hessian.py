"""Second moments of the inputs of a block's linears, collected while calibration tokens pass through it.

Nothing is padded, so every token counts, and counts once. What a token went through already is kept, so that nothing is
computed again that did not change. Knows blocks and their inputs, nothing of what is solved.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mycli.quant.layer_streaming import StreamedModel, Surroundings
from mycli.quant.rounding.error_compensation import Moments
from mycli.runtime.device.system import trim
from mycli.runtime.errors import ModelError
from mycli.runtime.layers.transformer import Block

HELD = 8  # every so many windows, one is kept apart to judge by


@dataclass
class View:
    """A block and the residual stream [windows, context, hidden], on the host, that enters it.

    Where the block is `settled`, its weights are final: the stream is moved on in place as products are observed, and
    has left the block when the last was. Otherwise only what follows attention is kept beside it, in `middle`.
    """

    block: Block
    stream: Tensor
    settled: bool = False
    middle: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.middle = self.stream if self.settled else torch.empty_like(self.stream)


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
        raise ModelError("activations are NaN or infinite", "the model does not hold on this text; try other --calib")


@torch.inference_mode()
def inputs(model: StreamedModel, view: View, product: str, rows: slice, surroundings: Surroundings) -> Tensor:
    """What `product`, one of `Block.INPUTS`, gets for the windows `rows`: [windows, context, K].

    Products must be asked for in order: `down` goes on from where `gate_up` left `middle`, or `o` a settled stream.
    """
    block, device = view.block, model.placement.device
    if product == "qkv":
        return block.input_norm(view.stream[rows].to(device))  # type: ignore[no-any-return]  # a Tensor: torch's stub
    if product == "o" or (product == "gate_up" and not view.settled):
        x = view.stream[rows].to(device)
        attended = block.attended(x, *surroundings, None)
        if product == "gate_up" or view.settled:
            view.middle[rows] = (x + block.o(attended)).to(view.middle.device)
        if product == "o":
            return attended
    x = view.middle[rows].to(device)
    if product == "gate_up":
        return block.post_norm(x)  # type: ignore[no-any-return]  # as above
    activated = block.activated(x)
    if view.settled:
        view.stream[rows] = (x + block.down(activated)).to(view.stream.device)
    return activated


@torch.inference_mode()
def leave(model: StreamedModel, view: View) -> None:
    """Move the stream out of a block whose weights have become final since `gate_up` was observed."""
    for rows in model.batches(view.stream):
        x = view.middle[rows].to(model.placement.device)
        view.stream[rows] = (x + view.block.down(view.block.activated(x))).to(view.stream.device)


@torch.inference_mode()
def observe(
    model: StreamedModel, quantized: View, original: View | None, product: str, surroundings: Surroundings
) -> tuple[Moments, Moments]:
    """Moments of what `product` gets in both models: of most windows, and of the windows held apart.

    Without `original` there is no drift. Raises ModelError that names the layer and the windows where activations are
    not finite.
    """
    linear = quantized.block.product(product)
    device = model.placement.device
    fitted, held = (Moments.zeros(linear.in_features, device) for _ in range(2))
    for rows in model.batches(quantized.stream):
        with rough_products(device):
            x = inputs(model, quantized, product, rows, surroundings).float()
            y = x if original is None else inputs(model, original, product, rows, surroundings).float()
        try:
            require_finite(x)
            require_finite(y)
        except ModelError as error:
            windows = f"calibration windows {rows.start} to {rows.stop - 1}"
            raise ModelError(f"{linear.specs[0].name}: {error.message} in {windows}", error.hint) from None
        apart = torch.arange(rows.start, rows.stop) % HELD == HELD - 1
        with rough_products(device):
            for moments, chosen in ((fitted, ~apart), (held, apart)):
                moments.add(x[chosen].flatten(0, 1), y[chosen].flatten(0, 1))
    del x, y
    trim(apart=4 << 20)  # matrices of quite other sizes will be made, few of them, and large
    return fitted, held
