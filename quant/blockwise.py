"""Quantizing block by block with data: each product of a block sees the inputs that the quantized model gives it.

Two copies of one block are on the device at a time, the original and the one being quantized; the residual streams of
both models lie on the host. Within a block the order is that of execution, qkv, o, gate_up, down: each is observed
after those before it were quantized, and aims at what the original puts out; then, if asked, the block is trained as a
whole. Knows no solver by name and no files beyond the checkpoint read from.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from mycli.quant import solvers, transforms
from mycli.quant.calibration.hessian import HELD, BlockState, leave, observe, require_finite, rough_products
from mycli.quant.layer_streaming import Sides, StreamedModel, restore
from mycli.quant.model_card import Layer
from mycli.quant.progress import ReportProgress, silent
from mycli.quant.rounding.error_compensation import Moments, refit
from mycli.quant.rounding.grid import (
    Grid,
    Quantized,
    Search,
    dequantize_codes,
    relative_error,
    round_to_grid,
    round_to_nearest,
)
from mycli.quant.transforms import TransformModule
from mycli.quant.tuning.block import preferred_shifts, tune_block
from mycli.quant.work_folder import Solved, WorkFolder
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.device.system import trim_heap
from mycli.runtime.errors import ModelError
from mycli.runtime.layers.attention import PromptAttention
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.layer_part import PassContext
from mycli.runtime.layers.linear import Linear
from mycli.runtime.quantization.scheme import Packing

UNSEEN = "calibration sent the expert too few tokens"

Sink = Callable[[Solved], None]  # takes each block as soon as it is solved, and the head


class Solver:
    """Solves linears that share an input and a packing, and describes what came of it."""

    def __init__(
        self,
        method: str,
        scale_dtype: torch.dtype,
        search: Search,
        transform: str | None = None,
        tunes: bool = False,
    ) -> None:
        self._solver = solvers.load(method)
        self.scale_dtype = scale_dtype
        self._search = search
        self.transform = None if transform is None else transforms.load(transform)
        self.tunes = tunes

    def grid(self, packing: Packing) -> Grid:
        """What it chooses from."""
        return Grid(packing, self.scale_dtype, self._search)

    def solve(
        self, weights: Mapping[str, Tensor], packing: Packing, fitted: Moments, held: Moments
    ) -> tuple[dict[str, Quantized], list[Layer], dict[str, Tensor]]:
        """weights [N, K] by name, stacked and solved as one, for the moments of most windows and of those held apart.

        Where a linear came out worse than plain rounding with the same scales, it is rounded instead. Last come the
        `preferred_shifts` by name, if a block is tuned.
        """
        grid = self.grid(packing)
        target, share = refit(torch.cat(list(weights.values())), fitted, held)
        hessian = fitted.hessian + held.hessian
        try:
            solution = self._solver.solve(target, grid, hessian)
        except ModelError as error:
            raise error.with_message(f"{', '.join(weights)}: {error.message}") from error
        solved: dict[str, Quantized] = {}
        layers: list[Layer] = []
        calls: dict[str, Tensor] = {}
        start = 0
        for name, weight in weights.items():
            rows = slice(start, start + len(weight))
            wanted, scales = target[rows], solution.quantized.scales[rows]
            ours, rounded = Quantized(solution.quantized.codes[rows], scales), round_to_scales(wanted, scales, grid)
            errors = [output_error(wanted, each, grid, hessian) for each in (ours, rounded)]
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
                    refit=share,
                    damping=solution.damping,
                    dead_columns=solution.dead_columns,
                    fallback=fallback,
                )
            )
            if self.tunes:
                calls[name] = preferred_shifts(wanted, solved[name], grid, hessian)
            start = rows.stop
        return solved, layers, calls

    def round(self, weights: Mapping[str, Tensor], packing: Packing) -> tuple[dict[str, Quantized], list[Layer]]:
        """Plain rounding of weights [N, K] by name, for an expert of which calibration says too little."""
        grid = self.grid(packing)
        solved = {name: round_to_nearest(weight, grid)[0] for name, weight in weights.items()}
        layers = [
            Layer(name, packing.name, relative_error(weight, solved[name], grid), fallback=UNSEEN)
            for name, weight in weights.items()
        ]
        return solved, layers


def round_to_scales(weight: Tensor, scales: Tensor, grid: Grid) -> Quantized:
    """Plain rounding with given scales."""
    return Quantized(round_to_grid(weight, scales, grid), scales)


def output_error(weight: Tensor, quantized: Quantized, grid: Grid, hessian: Tensor) -> float:
    """||(W - W') X||^2 / ||W X||^2 for inputs X of second moments `hessian` [K, K]; 0 where the output is zero."""
    wanted = weight.float()
    lost = dequantize_codes(quantized, grid).sub_(wanted)
    total = float((wanted @ hessian).mul_(wanted).sum(dtype=torch.float64))
    return float((lost @ hessian).mul_(lost).sum(dtype=torch.float64)) / total if total > 0 else 0.0


def quantize_blocks(
    model: StreamedModel,
    packings: Mapping[str, Packing],
    solver: Solver,
    windows: Tensor,
    sink: Sink,
    work: WorkFolder | None = None,
    progress: ReportProgress = silent,
) -> list[Layer]:
    """Solve every linear in `packings` of `model`, in order of execution; windows int64 [samples, seq].

    Blocks that `work` holds are taken from it, the others kept in it. While a block is solved the one before it is
    written, by `sink` too, and the one after it is read ahead.
    """
    config = model.config
    stream, full = model.embed(windows), model.embed(windows)
    ours = model.sides(windows)
    sides = (ours, None if ours is None else ours.twin())
    layers: list[Layer] = []

    def keep(index: int, solved: Solved, is_new: bool) -> None:
        if work is not None and is_new:
            work.save(index, solved)
        sink(solved)

    with ThreadPoolExecutor(1) as aside:
        written: Future[None] | None = None
        for index in range(config.layers + 1):
            if index == config.layers and config.head().name not in packings:
                break
            if index + 1 < config.layers:
                aside.submit(model.expect, index + 1)
            found = solved = None if work is None else work.load(index)
            if index < config.layers:
                solved = _pass_block(model, index, stream, full, sides, packings, solver, found)
            elif solved is None:
                solved = _solve_head(model, stream, full, packings, solver)
            if written is not None:
                written.result()
            written = aside.submit(keep, index, solved, found is None)
            layers += solved.layers
            progress("quantizing", len(layers), len(packings))
        if written is not None:
            written.result()
    return layers


def _pass_block(
    model: StreamedModel,
    index: int,
    stream: Tensor,
    full: Tensor,
    sides: tuple[Sides | None, Sides | None],
    packings: Mapping[str, Packing],
    solver: Solver,
    found: Solved | None,
) -> Solved:
    """A block as `found`, or solved here; `stream` of the quantized model and `full` of the original have left it.

    `sides` of both.
    """
    context = model.context(stream.shape[1])
    exact = replace(context, attention=PromptAttention())
    solved, settled = found, False
    if solved is None:
        quantized = BlockState(model.block(index), stream, sides=sides[0])
        original = BlockState(model.block(index), full, settled=solver.transform is None, sides=sides[1])
        solved, calls = _solve_block(model, quantized, original, packings, solver, exact)
        settled = original.settled
    with rough_products(model.placement.device):
        if not settled:
            # Read again where it was rescaled: a run that goes on after this block then has the same bits.
            model.advance(model.block(index), full, context, sides[1])
        if found is None and not solver.tunes:
            leave(model, quantized, exact)
            return solved
    if found is None:
        del quantized, original
        solved = tune_block(model, index, solved, calls, packings, solver.scale_dtype, stream, full)
    block = model.block(index)
    _install_all(block, solved, packings, torch_dtype(model.config.dtype))
    with rough_products(model.placement.device):
        model.advance(block, stream, context, sides[0])
    return solved


def _solve_block(
    model: StreamedModel,
    quantized: BlockState,
    original: BlockState,
    packings: Mapping[str, Packing],
    solver: Solver,
    context: PassContext,
) -> tuple[Solved, dict[str, Tensor]]:
    """The block, and its `preferred_shifts` if it is to be tuned."""
    linears: dict[str, Quantized] = {}
    layers: list[Layer] = []
    calls: dict[str, Tensor] = {}
    changed: dict[str, Tensor] = {}
    if solver.transform is not None:
        changed = _fold_block(model, quantized, original, packings, solver, solver.transform, context)
    for product, linear in quantized.block.products.items():
        packing = packings[linear.specs[0].name]
        observed = observe(model, quantized, original, product, context)
        parts = torch.split(linear.weight(), [spec.out_features for spec in linear.specs])
        weights = {spec.name: part for spec, part in zip(linear.specs, parts, strict=True)}
        close: dict[str, Tensor] = {}
        if observed.few:
            solved, described = solver.round(weights, packing)
        else:
            solved, described, close = solver.solve(weights, packing, observed.fitted, observed.held)
        del observed, parts, weights
        trim_heap()
        _install(linear, solved, packing, torch_dtype(model.config.dtype))
        linears |= solved
        layers += described
        calls |= close
    return Solved(linears, changed, tuple(layers)), calls


def _fold_block(
    model: StreamedModel,
    quantized: BlockState,
    original: BlockState,
    packings: Mapping[str, Packing],
    solver: Solver,
    transform: TransformModule,
    context: PassContext,
) -> dict[str, Tensor]:
    """Rescale the inputs of the products of a block that is not quantized yet, and of the original with it."""
    changed: dict[str, Tensor] = {}
    for product, linear in quantized.block.products.items():
        fitted, held, few = observe(model, quantized, None, product, context)  # in order, or the stream stands still
        source = quantized.block.spec.input_source(product)
        if source is None or few:  # nothing before it could take a scale back, or too little is known
            continue
        grid = solver.grid(packings[linear.specs[0].name])
        weight, hessian = linear.weight(), fitted.hessian + held.hessian
        scale = transform.choose_scale(weight, grid, hessian, source)
        if scale is not None:
            for view in (quantized, original):
                changed |= transform.fold(view.block, product, scale, model.stored_dtype)
    return changed


def _solve_head(
    model: StreamedModel, stream: Tensor, full: Tensor, packings: Mapping[str, Packing], solver: Solver
) -> Solved:
    head = model.config.head()
    moments = _moments_of_head(model, stream, full)
    linears, layers, _ = solver.solve(model.weights([head]), packings[head.name], *moments)
    return Solved(linears, {}, tuple(layers))


def _install_all(block: Block, solved: Solved, packings: Mapping[str, Packing], dtype: torch.dtype) -> None:
    """Make `block` what it was when `solved` was."""
    restore(block, solved.changed)
    for linear in block.products.values():
        names = [spec.name for spec in linear.specs]
        _install(linear, {name: solved.linears[name] for name in names}, packings[names[0]], dtype)


@torch.no_grad()
def _moments_of_head(model: StreamedModel, stream: Tensor, full: Tensor) -> tuple[Moments, Moments]:
    fitted, held = (Moments.zeros(stream.shape[2], model.placement.device) for _ in range(2))
    for index, (ours, theirs) in enumerate(zip(stream, full, strict=True)):
        x, y = model.normed(ours).float(), model.normed(theirs).float()
        require_finite(x)
        with rough_products(model.placement.device):
            (held if index % HELD == HELD - 1 else fitted).add(x, y)
    return fitted, held


def _install(linear: Linear, solved: Mapping[str, Quantized], packing: Packing, dtype: torch.dtype) -> None:
    """Let the block go on with the weights as every reader will see them, rounded to the scales' dtype."""
    restored = [dequantize_codes(each, Grid(packing, dtype)).to(dtype) for each in solved.values()]
    linear.replace(torch.cat(restored).to(linear.weight().dtype))
