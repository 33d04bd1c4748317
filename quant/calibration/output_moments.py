"""Second moments of the gradients of a model's loss by the outputs of its linears and of its blocks."""

# The loss is that of tokens drawn from the model's own distribution, so that the moments are those of the Fisher
# information: the second derivative of the KL divergence from the original.

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from mycli.quant.calibration.gradients import BackwardPass
from mycli.quant.calibration.hessian import reduced_precision
from mycli.quant.evaluate import STREAM_BYTES
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.progress import ReportProgress, silent
from mycli.quant.rounding.rows import BLOCK_ROWS
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.layer_part import PassContext
from mycli.runtime.layers.linear import Linear, RoutedProduct
from mycli.runtime.models.experts_spec import stacked_product
from mycli.runtime.sampling.sampler import tokens_at

GRADIENT_WINDOWS = 128
_TOKENS = 64


def moments_name(product: str) -> str:
    """Return the key of a product's moments; the down projections of all experts share one, as they are summed."""
    stacked = stacked_product(product)
    return stacked if stacked == "experts.down" else product


@dataclass
class LayerMoments:
    """Sums over tokens of g g^T for gradients g, each fp32 [blocks, BLOCK_ROWS, BLOCK_ROWS] (`rounding.rows`)."""

    products: dict[str, Tensor] = field(default_factory=dict)
    stream: Tensor | None = None  # of the residual stream after the block

    @property
    def nbytes(self) -> int:
        return sum(moments.nbytes for moments in (*self.products.values(), self.stream) if moments is not None)

    def add(self, gradient: Tensor, product: str | None = None) -> None:
        """Add gradients [windows, context, N] of the outputs of a product, or of the stream."""
        slopes = gradient.flatten(0, -2).float()
        if len(slopes) % _TOKENS:
            # Rows of zeros make the numbers of tokens few: oneDNN keeps what it compiles for each, and experts differ
            # in theirs.
            slopes = functional.pad(slopes, (0, 0, 0, -len(slopes) % _TOKENS))
        rows = torch.split(slopes, BLOCK_ROWS, dim=1)
        name = None if product is None else moments_name(product)
        sums = self.stream if name is None else self.products.get(name)
        if sums is None:
            sums = slopes.new_zeros(len(rows), BLOCK_ROWS, BLOCK_ROWS)
            if name is None:
                self.stream = sums
            else:
                self.products[name] = sums
        # One product for each block, because torch's batched product copies them and takes three times as long.
        for block, part in zip(sums, rows, strict=True):
            block[: part.shape[1], : part.shape[1]].addmm_(part.T, part)


def windows_at_once(windows: int, seq: int, width: int, layers: int) -> int:
    # Their residual streams at every block stay within `STREAM_BYTES`.
    return min(windows, max(1, STREAM_BYTES // (4 * seq * width * (layers + 2))))


def output_moments(
    model: StreamedModel, windows: Tensor, seed: int, progress: ReportProgress = silent
) -> list[LayerMoments]:
    """The moments of each layer on at most `GRADIENT_WINDOWS` of the windows int64 [samples, seq]."""
    generator = torch.Generator().manual_seed(seed)
    windows = windows[torch.randperm(len(windows), generator=generator)[:GRADIENT_WINDOWS]]
    config, context = model.config, model.context(windows.shape[1])
    moments: list[LayerMoments] = [LayerMoments() for _ in range(config.layers)]

    def loss(window: int, scores: Tensor) -> Tensor:
        drawn = tokens_at(scores.detach().exp(), torch.rand(len(scores), generator=generator).tolist())
        return scores.gather(1, drawn.clamp_(max=scores.shape[1] - 1)).sum()  # `observe` reports what is not finite

    chunks = torch.split(windows, windows_at_once(len(windows), windows.shape[1], config.stream_width, config.layers))
    done, steps = 0, 2 * config.layers * len(chunks)
    for chunk in chunks:
        streams, side_inputs = [model.embed(chunk)], model.side_inputs(chunk)
        for index in range(config.layers):
            streams.append(streams[-1].clone())
            with torch.no_grad(), reduced_precision(model.placement.device):
                model.advance(model.block(index), streams[-1], context, side_inputs)
            done += 1
            progress("measuring gradients", done, steps)
        with reduced_precision(model.placement.device):
            backward = BackwardPass(model, model.head_gradient(streams.pop(), loss), context, side_inputs)
        for index in reversed(range(config.layers)):
            _add(model, index, streams.pop(), backward, moments[index])
            done += 1
            progress("measuring gradients", done, steps)
    return moments


def _add(model: StreamedModel, index: int, stream: Tensor, backward: BackwardPass, moments: LayerMoments) -> None:
    block, device = model.block(index), model.placement.device
    names = {linear: product for product, linear in block.products.items()}
    outputs: list[tuple[Linear | RoutedProduct, Tensor]] = []

    def run(x: Tensor, context: PassContext) -> Tensor:
        y, outputs[:] = _outputs(block, x, context)
        return y

    for windows in model.batches(stream):
        with reduced_precision(device):
            moments.add(backward.gradient[windows].to(device))
            backward.through(block.spec, windows, stream, run)
            for product, output in outputs:
                assert output.grad is not None
                for linear, rows in _rows(product, output.grad):
                    moments.add(rows, names[linear])
        outputs.clear()


def _outputs(
    block: Block, x: Tensor, context: PassContext
) -> tuple[Tensor, list[tuple[Linear | RoutedProduct, Tensor]]]:
    # The output of a block, and those of its products, which will get their gradients.
    outputs: list[tuple[Linear | RoutedProduct, Tensor]] = []
    context = block.routed(x, context)
    for part in block.parts:
        steps, output = part.steps(x, context), None
        try:
            product, value = next(steps)
            while True:
                output = product(value)
                output.retain_grad()
                outputs.append((product, output))
                product, value = steps.send(output)
        except StopIteration as end:
            x = end.value
    return x, outputs


def _rows(product: Linear | RoutedProduct, slope: Tensor) -> list[tuple[Linear, Tensor]]:
    # Of a routed product those [n, N] of each expert that tokens reached.
    if isinstance(product, Linear):
        return [(product, slope)]
    return [(product.linears[expert], slope[pairs]) for expert, pairs in product.route.slices.items()]
