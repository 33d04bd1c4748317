"""Chooses the width of each linear for a mean number of bits, by the loss of the output distribution (KL)."""

# For weights W + d instead of W, the KL divergence is about quadratic in d, and half the product of d with its gradient
# there is the share of each linear. One backward pass through a copy quantized to one low width gives all shares (as
# `dynamic_quant` of mlx-lm does); at other widths they scale with the squared error of rounding.

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from mycli.quant.calibration.gradients import BackwardPass
from mycli.quant.calibration.hessian import reduced_precision
from mycli.quant.layer_streaming import SideInputs, StreamedModel
from mycli.quant.progress import ReportProgress, silent
from mycli.quant.rounding.grid import Grid, relative_error, round_to_nearest
from mycli.quant.solving.column_balance import balance
from mycli.runtime.checkpoint import formats
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.errors import UsageError
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.layer_part import PassContext
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import stacked_product
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import BITS, Packing

COPY_WINDOWS = 32  # for calibrating the copy
WINDOWS = 16  # for the shares: sums of millions of products, which converge with few tokens

WeightType = TypeVar("WeightType", int, str)  # a width, or the name of a type of GGUF


@dataclass(frozen=True)
class Share:
    """Linears that get one width because readers fuse them: those of a product, or of a layer's experts.

    bytes, loss (KL): at each width.
    """

    weights: int
    bytes: Mapping[int, int]
    loss: Mapping[int, float]


def low_width(bits_per_weight: float, group: int | None) -> int:
    """Return the widest width below 8 that fits the target, or the narrowest of all."""
    scale = 0.0 if group is None else 16 / group
    return max((bits for bits in BITS if bits < 8 and bits + scale <= bits_per_weight), default=min(BITS))


def width_units(config: ModelConfig, *, by_tensor: bool = False) -> list[list[int]]:
    """Group the products that must have one width; return their positions in order of execution.

    Engines multiply all experts of a layer by one kernel, so these are a group; any other product is one.
    by_tensor: for formats that store a linear of all experts as one tensor: gate and up are a group, down another.
    """
    units: dict[tuple[int, str], list[int]] = {}
    products = [(layer.index, product) for layer in config.layer_specs for product in layer.products()]
    for place, (index, product) in enumerate(products):
        stacked = stacked_product(product)
        unit = stacked if by_tensor or stacked == product else "experts"
        units.setdefault((index, unit), []).append(place)
    return list(units.values())


def add_shares(shares: Sequence[Share]) -> Share:
    sizes = {bits: sum(share.bytes[bits] for share in shares) for bits in shares[0].bytes}
    losses = {bits: sum(share.loss[bits] for share in shares) for bits in shares[0].loss}
    return Share(sum(share.weights for share in shares), sizes, losses)


def allocate(shares: Sequence[Share], bits_per_weight: float, low: int) -> tuple[int, ...]:
    """Return the width of each share for least loss within `bits_per_weight`; UsageError if `low` does not fit."""
    # Starts at `low`, because shares measured there say little about fewer bits.
    weights = sum(share.weights for share in shares)
    budget = int(bits_per_weight * weights / 8)
    spent = sum(share.bytes[low] for share in shares)
    least = 8 * spent / weights
    if least > bits_per_weight:
        raise UsageError(
            f"a target of {bits_per_weight:g} bits per weight is too low: {low} bits with scales take {least:.3f}",
            code="larger-target-or-group",
        )
    losses = [share.loss for share in shares]
    return tuple(spend_bytes([share.bytes for share in shares], losses, [low] * len(shares), budget - spent))


def spend_bytes(
    sizes: Sequence[Mapping[WeightType, int]],
    losses: Sequence[Mapping[WeightType, float]],
    start: Sequence[WeightType],
    budget: int,
) -> list[WeightType]:
    """Return the type of each product for least loss within `budget` bytes beyond the types of `start`.

    Greedy: each step is the one that lowers the loss most per byte. It may skip types, because the loss need not fall
    evenly with the size.
    """
    types = list(start)
    while True:
        step, rate = None, 0.0
        for index, (size, loss, now) in enumerate(zip(sizes, losses, types, strict=True)):
            for name in size:
                more, gain = size[name] - size[now], loss[now] - loss[name]
                if 0 < more <= budget and gain / more > rate:
                    step, rate = (index, name, more), gain / more
        if step is None:
            return types
        types[step[0]] = step[1]
        budget -= step[2]


def measure_shares(
    model: StreamedModel,
    low: StreamedModel,
    windows: Tensor,
    progress: ReportProgress = silent,
    *,
    balanced: bool = False,
) -> list[Share]:
    """Measure the shares of all products of `model`, in order of execution, on `low`, its copy of one width.

    balanced: the outlying columns of `low` were balanced.
    """
    config = model.config
    context = model.context(windows.shape[1])
    reference, streams, side_inputs = _forward(model, low, windows, context, progress)
    backward = BackwardPass(low, _kl_gradient(model, reference, streams[-1]), context, side_inputs)
    shares: list[Share] = []
    for index in reversed(range(config.layers)):
        block, original, stream = _dense(low, index), model.block(index), streams[index]
        if balanced:  # the same factors, so that the weights can be compared
            balance(original, model.stored_dtype)
        rounded = {product: linear.weight().requires_grad_() for product, linear in block.products.items()}
        for rows in model.batches(stream):
            backward.through(block.spec, rows, stream, block)
        for product, linear in reversed(original.products.items()):
            weight, slope = linear.weight(), rounded[product].grad
            loss = 0.0  # of an expert that no token reached
            if slope is not None:
                loss = float(((rounded[product].detach() - weight) * slope).sum(dtype=torch.float64)) / 2
            packing = low.packings[linear.specs[0].name]
            shares.append(_share(config, linear.specs, weight, max(0.0, loss), packing))
        progress("measuring sensitivity", 2 * config.layers - index, 2 * config.layers)
    return shares[::-1]


def _forward(
    model: StreamedModel, low: StreamedModel, windows: Tensor, context: PassContext, progress: ReportProgress
) -> tuple[Tensor, Tensor, SideInputs | None]:
    """Return the last stream of `model`; of `low` the stream before each block and after the last, and side inputs."""
    layers, side_inputs = model.config.layers, model.side_inputs(windows)
    lows = None if side_inputs is None else side_inputs.twin()  # the tables of a copy are not quantized
    with torch.no_grad(), reduced_precision(model.placement.device):
        reference = model.embed(windows)
        streams = reference.new_empty(layers + 1, *reference.shape)
        streams[0] = reference
        for index in range(layers):
            model.advance(model.block(index), reference, context, side_inputs)
            streams[index + 1] = streams[index]
            low.advance(_dense(low, index), streams[index + 1], context, lows)
            progress("measuring sensitivity", index + 1, 2 * layers)
    return reference, streams, lows


def _kl_gradient(model: StreamedModel, reference: Tensor, stream: Tensor) -> Tensor:
    count = reference.shape[0] * reference.shape[1]

    def divergence(window: int, scores: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = model.logits(reference[window].clone()).log_softmax(1)
        return functional.kl_div(scores, teacher, reduction="sum", log_target=True) / count

    return model.head_gradient(stream, divergence)


def _share(config: ModelConfig, specs: Sequence[LinearSpec], weight: Tensor, loss: float, low: Packing) -> Share:
    # `loss` was measured with the packing `low`.
    errors, sizes, dtype = {}, {}, torch_dtype(config.dtype)
    for bits in BITS:
        packing = Packing(bits, low.group_size)
        grid = Grid(packing, dtype)
        errors[bits] = relative_error(weight, round_to_nearest(weight, grid)[0], grid)
        layout = formats.writable({spec.name: packing for spec in specs})
        tensors = [tensor for spec in specs for tensor in layout.planned_tensors(spec, packing, dtype)]
        sizes[bits] = sum(kind.itemsize * math.prod(shape) for _, kind, shape in tensors)
    least = errors[low.bits] or 1.0
    return Share(weight.numel(), sizes, {bits: loss * errors[bits] / least for bits in BITS})


def _dense(low: StreamedModel, index: int) -> Block:
    block = low.block(index)
    for linear in block.products.values():
        linear.replace(linear.weight().to(low.placement.dtype))
    return block
