"""Quantizing block by block with data: each product of a block sees the inputs that the quantized model gives it.

One block is on the device at a time, the residual stream of the calibration tokens on the host. Within a block the
order is that of execution, qkv, o, gate_up, down: each is observed after those before it were quantized. Knows no
scheme by name and no files beyond the checkpoint read from.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mycli.quant import schemes
from mycli.quant.grid import Grid, Quantized, Search, dequantize, relative_error, round_to_grid
from mycli.quant.observe import Hessian, observe
from mycli.quant.progress import Progress, silent
from mycli.quant.record import Layer
from mycli.quant.streaming import StreamedModel, batches
from mycli.runtime.device import TORCH_DTYPES
from mycli.runtime.errors import ModelError
from mycli.runtime.linear import DenseMatmul, Linear
from mycli.runtime.packing import Packing
from mycli.runtime.transformer import Block

Sink = Callable[[str, Quantized], None]  # takes each linear by its name as soon as it is solved


class Solver:
    """Solves linears that share an input and a packing, and describes what came of it."""

    def __init__(self, method: str, scale_dtype: torch.dtype, search: Search) -> None:
        self._scheme = schemes.load(method)
        self._scale_dtype = scale_dtype
        self._search = search

    def solve(
        self, weights: Mapping[str, Tensor], packing: Packing, hessian: Tensor
    ) -> tuple[dict[str, Quantized], list[Layer]]:
        """weights [N, K] by name, stacked and solved as one.

        Where a linear came out worse than plain rounding with the same scales, it is rounded instead.
        """
        grid = Grid(packing, self._scale_dtype, self._search)
        stacked = torch.cat(list(weights.values())) if len(weights) > 1 else next(iter(weights.values()))
        try:
            solution = self._scheme.solve(stacked, grid, hessian)
        except ModelError as error:
            raise ModelError(f"{', '.join(weights)}: {error.message}", error.hint) from error
        solved: dict[str, Quantized] = {}
        layers: list[Layer] = []
        start = 0
        for name, weight in weights.items():
            rows = slice(start, start + len(weight))
            ours = Quantized(solution.quantized.codes[rows], solution.quantized.scales[rows])
            rounded = Quantized(round_to_grid(weight, ours.scales, grid), ours.scales)
            errors = [output_error(weight, each, grid, hessian) for each in (ours, rounded)]
            fallback = "Hessian not positive definite" if solution.fallback else None
            if errors[0] > errors[1]:
                fallback = "plain rounding is better"
            solved[name] = rounded if fallback else ours
            layers.append(
                Layer(
                    name,
                    packing.name,
                    relative_error(weight, solved[name], grid),
                    output_error=min(errors),
                    rounding_output_error=errors[1],
                    damping=solution.damping,
                    dead_columns=solution.dead_columns,
                    fallback=fallback,
                )
            )
            start = rows.stop
        return solved, layers


def output_error(weight: Tensor, quantized: Quantized, grid: Grid, hessian: Tensor) -> float:
    """||(W - W') X||^2 / ||W X||^2 for inputs X of second moments `hessian` [K, K]; 0 where the output is zero."""
    wanted = weight.float()
    lost = dequantize(quantized, grid).sub_(wanted)
    total = float((wanted @ hessian).mul_(wanted).sum(dtype=torch.float64))
    return float((lost @ hessian).mul_(lost).sum(dtype=torch.float64)) / total if total > 0 else 0.0


def quantize_blocks(
    model: StreamedModel,
    packings: Mapping[str, Packing],
    solver: Solver,
    windows: Tensor,
    sink: Sink,
    progress: Progress = silent,
) -> list[Layer]:
    """Solve every linear in `packings` of `model`, in order of execution; windows int64 [samples, seq]."""
    config, device = model.config, model.placement.device
    surroundings = model.surroundings(windows.shape[1])
    stream = model.embed(windows)
    layers: list[Layer] = []
    for index in range(config.layers):
        block = model.block(index)
        for product in Block.INPUTS:
            linear = getattr(block, product)
            assert isinstance(linear, Linear)
            hessian = observe(block, product, stream, surroundings, device)
            solved, described = solver.solve(model.weights(linear.specs), packings[linear.specs[0].name], hessian)
            del hessian
            _install(linear, solved, packings[linear.specs[0].name], TORCH_DTYPES[config.dtype])
            for name, quantized in solved.items():
                sink(name, quantized)
            layers += described
            progress("quantizing", len(layers), len(packings))
        model.advance(block, stream, surroundings)
    head = config.head()
    if head.name in packings:
        hessian_of_head = Hessian(head.in_features, device)
        for part in batches(stream):
            hessian_of_head.add(model.normed(part))
        solved, described = solver.solve(model.weights([head]), packings[head.name], hessian_of_head.mean())
        sink(head.name, solved[head.name])
        layers += described
        progress("quantizing", len(layers), len(packings))
    return layers


def _install(linear: Linear, solved: Mapping[str, Quantized], packing: Packing, dtype: torch.dtype) -> None:
    """Let the block go on with the weights as every reader will see them, rounded to the scales' dtype."""
    restored = [dequantize(each, Grid(packing, dtype)).to(dtype) for each in solved.values()]
    linear.matmuls = (DenseMatmul(torch.cat(restored).to(linear.matmuls[0].dequantize().dtype)),)
