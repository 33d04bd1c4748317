"""Which linear gets how many bits, where the mean of them is given: by what the output distribution would lose.

For weights that are W + d instead of W, the divergence KL of the output is about quadratic in d, and half the product
of d with its gradient there is the share of each linear. One backward pass through a copy of one low width gives that
share for all of them (as `dynamic_quant` of mlx-lm does); at other widths it changes with the squared error of
rounding. Linears that readers fuse, q k v and gate up, get one width. The model is streamed, forwards and backwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from mycli.quant.calibration.hessian import rough_products
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.progress import ReportProgress, silent
from mycli.quant.rounding.grid import Grid, relative_error, round_to_nearest
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.errors import UsageError
from mycli.runtime.layers.attention import PromptAttention
from mycli.runtime.layers.block import Block
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import BITS, Packing

COPY_WINDOWS = 32  # that the copy of one width is calibrated on
_SHAPE_BYTES = 16  # of a linear's `weight_shape`
WINDOWS = 16  # of calibration: the shares of whole linears are sums of millions of numbers, and settle soon


@dataclass(frozen=True)
class Share:
    """Linears of one width: their bytes and what they cost, in KL, at each width of `BITS`."""

    weights: int
    bytes: Mapping[int, int]
    loss: Mapping[int, float]


def low_width(bits_per_weight: float, group: int | None) -> int:
    """Of the copy that sensitivities are taken at: the widest below 8 that the target leaves room for."""
    scale = 0.0 if group is None else 16 / group
    return max((bits for bits in BITS if bits < 8 and bits + scale <= bits_per_weight), default=min(BITS))


def allocate(shares: Sequence[Share], bits_per_weight: float, low: int) -> tuple[int, ...]:
    """The width of each share that loses least within `bits_per_weight`, scales included.

    From `low` bits on, since what was measured there says little of fewer; always the step that gains most for its
    bytes. Raises UsageError where not even `low` fits.
    """
    widths = [low for _ in shares]
    budget = int(bits_per_weight * sum(each.weights for each in shares) / 8)
    spent = sum(each.bytes[low] for each in shares)
    if spent > budget:
        least = 8 * spent / sum(each.weights for each in shares)
        raise UsageError(
            f"a target of {bits_per_weight:g} bits per weight: {low} bits with their scales take {least:.3f}",
            code="larger-target-or-group",
        )
    while True:
        step, rate = None, 0.0
        for index, (each, now) in enumerate(zip(shares, widths, strict=True)):
            for bits in BITS:
                more, gain = each.bytes[bits] - each.bytes[now], each.loss[now] - each.loss[bits]
                if 0 < more <= budget - spent and gain / more > rate:
                    step, rate = (index, bits, more), gain / more
        if step is None:
            return tuple(widths)
        widths[step[0]] = step[1]
        spent += step[2]


def measure_shares(
    model: StreamedModel, low: StreamedModel, windows: Tensor, progress: ReportProgress = silent
) -> list[Share]:
    """The shares of all products of `model`, in order of execution, judged at `low`, its copy of one width.

    windows int64 [samples, seq].
    """
    config = model.config
    context = model.context(windows.shape[1])
    exact = replace(context, attention=PromptAttention())
    with torch.no_grad(), rough_products(model.placement.device):
        wanted = model.embed(windows)
        streams = wanted.new_empty(config.layers + 1, *wanted.shape)
        streams[0] = wanted
        for index in range(config.layers):
            model.advance(model.block(index), wanted, context)
            streams[index + 1] = streams[index]
            low.advance(_dense(low, index), streams[index + 1], context)
            progress("measuring sensitivity", index + 1, 2 * config.layers)
    gradient = _gradient_of_head(model, streams[-1], wanted)
    shares: list[Share] = []
    for index in reversed(range(config.layers)):
        block, original, stream = _dense(low, index), model.block(index), streams[index]
        rounded = {product: linear.weight().requires_grad_() for product, linear in block.products.items()}
        for rows in model.batches(stream):
            x = stream[rows].clone().to(model.placement.device).requires_grad_()
            with rough_products(model.placement.device):
                block(x, exact).backward(gradient[rows].to(x))
            assert x.grad is not None
            gradient[rows] = x.grad.to(gradient)
        for product, linear in reversed(original.products.items()):
            weight, slope = linear.weight(), rounded[product].grad
            assert slope is not None
            loss = float(((rounded[product].detach() - weight) * slope).sum(dtype=torch.float64)) / 2
            packing = low.packings[linear.specs[0].name]
            shares.append(_share(config, linear.specs, weight, max(0.0, loss), packing))
        progress("measuring sensitivity", 2 * config.layers - index, 2 * config.layers)
    return shares[::-1]


def _share(config: ModelConfig, specs: Sequence[LinearSpec], weight: Tensor, loss: float, low: Packing) -> Share:
    """`loss` is that of the packing `low`."""
    errors, sizes = {}, {}
    for bits in BITS:
        packing = Packing(bits, low.group_size)
        grid = Grid(packing, torch_dtype(config.dtype))
        errors[bits] = relative_error(weight, round_to_nearest(weight, grid)[0], grid)
        sizes[bits] = sum(packing.bytes(spec.out_features, spec.in_features) + _SHAPE_BYTES for spec in specs)
    least = errors[low.bits] or 1.0
    return Share(weight.numel(), sizes, {bits: loss * errors[bits] / least for bits in BITS})


def _dense(low: StreamedModel, index: int) -> Block:
    """A block of the copy, its weights unpacked: a gradient does not pass through packed ones."""
    block = low.block(index)
    for linear in block.products.values():
        linear.replace(linear.weight().to(low.placement.dtype))
    return block


def _gradient_of_head(model: StreamedModel, rounded: Tensor, wanted: Tensor) -> Tensor:
    """Of the mean KL of all tokens, for the residual stream after the last block; both [windows, context, hidden]."""
    gradient = torch.empty(rounded.shape)
    count = rounded.shape[0] * rounded.shape[1]
    for index, (ours, theirs) in enumerate(zip(rounded, wanted, strict=True)):
        x = ours.clone().to(model.placement.device).requires_grad_()
        with torch.no_grad():
            target = model.logits(theirs.clone()).log_softmax(1)
        loss = functional.kl_div(model.logits(x).log_softmax(1), target, reduction="sum", log_target=True)
        (loss / count).backward()  # type: ignore[no-untyped-call]  # torch's stub
        assert x.grad is not None
        gradient[index] = x.grad.to(gradient)
    return gradient
