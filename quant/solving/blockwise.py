"""Quantizes a model block by block with calibration data: each product sees the inputs of the quantized model.

Within a block products are solved in order of execution (qkv, o, gate_up, down): each is observed after the ones
before it were quantized, and aims at the original's outputs. Then, if the recipe says so, the block is tuned as a
whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mycli.quant.calibration.hessian import (
    HELD_OUT_EVERY,
    CopyInput,
    Observed,
    ObservedBlock,
    finish_block,
    observe,
    observe_each,
    reduced_precision,
    require_finite,
)
from mycli.quant.calibration.output_moments import LayerMoments, moments_name
from mycli.quant.layer_streaming import SideInputs, StreamedModel, restore
from mycli.quant.output.model_card import Layer
from mycli.quant.output.work_folder import Solved, WorkFolder
from mycli.quant.progress import Callbacks, ReportNote
from mycli.quant.rounding.error_compensation import Moments
from mycli.quant.rounding.grid import Quantized
from mycli.quant.rounding.rows import rescaled
from mycli.quant.solving.column_balance import balance
from mycli.quant.solving.linear_solver import LinearSolver, SolvedProduct, rounding_error
from mycli.quant.tuning.block import tune_block
from mycli.quant.tuning.parameters import TunableBlock
from mycli.runtime.checkpoint.formats import EMBEDDING
from mycli.runtime.device.system import trim_heap
from mycli.runtime.layers.attention import PromptAttention
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.linear import Linear
from mycli.runtime.models.part_spec import LinearSpec, OutputRows
from mycli.runtime.quantization.scheme import Packing

Sink = Callable[[Solved], None]  # called with each solved block in order, the head last


class OriginalBlocks:
    """The original's blocks in order, and its residual stream on the host: one for all copies that are solved together.

    windows: calibration tokens int64 [samples, seq]; keeps: copies may keep inputs in memory (see `ObservedBlock`).
    """

    def __init__(self, model: StreamedModel, windows: Tensor, keeps: bool = True) -> None:
        self.model = model
        self.keeps = keeps
        self.windows = windows
        self.stream = model.embed(windows)
        self.side_inputs = model.side_inputs(windows)
        self._context = model.context(windows.shape[1])
        # Solvers see keys and values unrounded: a cache in another dtype may serve the model later.
        self.exact = replace(self._context, attention=PromptAttention())

    def hessians(self, block: Block) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield for each product of a block the second moments of its inputs, and whether of too few tokens."""
        state = ObservedBlock(block, self.stream.clone(), final=True, side_inputs=self.side_inputs)
        for product in block.products:
            fitted, held_out, too_few = observe(self.model, state, None, product, self.exact)
            yield product, fitted.hessian + held_out.hessian, too_few

    def observed(self, block: Block) -> ObservedBlock:
        # The stream leaves the block when its last product is observed.
        return ObservedBlock(block, self.stream, final=True, side_inputs=self.side_inputs)

    def advance(self, block: Block, stream: Tensor, side_inputs: SideInputs | None) -> None:
        with reduced_precision(self.model.placement.device):
            self.model.advance(block, stream, self._context, side_inputs)


class BlockSolver:
    """Solves the blocks of one copy in order, then its head if that is quantized."""

    # The copy's own residual stream lies on the host, and is advanced by every call.

    def __init__(
        self,
        original: OriginalBlocks,
        packings: Mapping[str, Packing],
        solver: LinearSolver,
        embedding: Tensor | None = None,
        outputs: Sequence[LayerMoments] | None = None,
    ) -> None:
        """`embedding`: the table of the quantized model; `outputs`: `output_moments` of the original."""
        self.original = original
        self.model = original.model
        self.packings = packings
        self.solver = solver
        self._outputs = outputs
        self.stream = original.stream.clone() if embedding is None else self.model.embed(original.windows, embedding)
        self.side_inputs = None if original.side_inputs is None else original.side_inputs.twin()

    @property
    def count(self) -> int:
        """The number of steps that complete the model: one per block, and one for a quantized head."""
        return self.model.config.layers + (self._head.name in self.packings)

    @property
    def _head(self) -> LinearSpec:
        # A format that quantizes embeddings solves a tied one as the head that it is.
        head = self.model.config.head()
        return replace(head, name=EMBEDDING) if self.model.config.tie_embeddings else head

    def moments(self, index: int) -> LayerMoments:
        return LayerMoments() if self._outputs is None else self._outputs[index]

    def resume(self, index: int, solved: Solved) -> None:
        if index < self.model.config.layers:
            self.advance(index, solved)

    @torch.no_grad()
    def solve_head(self) -> Solved:
        model, head = self.model, self._head
        fitted, held_out = (Moments.zeros(head.in_features, model.placement.device) for _ in range(2))
        for index, (ours, originals) in enumerate(zip(self.stream, self.original.stream, strict=True)):
            x, y = model.normed(ours).float(), model.normed(originals).float()
            require_finite(x)
            with reduced_precision(model.placement.device):
                (held_out if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else fitted).add(x, y)
        packing, weights = self.packings[head.name], model.weights([head])
        solved = self.solver.solve(weights, packing, fitted.complete(), held_out.complete())
        return Solved(solved.linears, {}, tuple(solved.layers))

    def advance(self, index: int, solved: Solved) -> None:
        block = self.model.block(index)
        restore(block, solved.changed)
        for linear in self.packed_products(block).values():
            self.install(linear, solved.linears)
        self.original.advance(block, self.stream, self.side_inputs)

    def packed_products(self, block: Block) -> dict[str, Linear]:
        # GGUF stores kv_b of latent attention in floats.
        return {name: linear for name, linear in block.products.items() if linear.specs[0].name in self.packings}

    def install(self, linear: Linear, solved: Mapping[str, Quantized]) -> None:
        """Replace a weight by the values that every reader computes from its codes."""
        names = [spec.name for spec in linear.specs]
        restored = [self.solver.restore(name, solved[name], self.packings[name]) for name in names]
        linear.replace(torch.cat(restored).to(linear.weight().dtype))


class _CopyOfBlock:
    # One block of a copy, while it is solved product by product.

    def __init__(self, blocks: BlockSolver, index: int, is_balanced: bool) -> None:
        """`is_balanced`: another copy has found no column to balance in this block."""
        self._blocks, self._index, self._solver = blocks, index, blocks.solver
        block = blocks.model.block(index)
        balances = self._solver.balances and not is_balanced
        self.changed, self._factors = balance(block, blocks.model.stored_dtype) if balances else ({}, {})
        self.is_balanced = self._solver.balances and not self._factors
        keeps = blocks.original.keeps
        self.state = ObservedBlock(block, blocks.stream, side_inputs=blocks.side_inputs, keeps=keeps)
        self._scales = dict(self._factors)  # by product: what divides the original's inputs
        self._moments = blocks.moments(index)
        self._outputs = dict(self._moments.products)
        _rescale_outputs(self._outputs, block, self._factors)
        self._rounding: dict[str, float] = {}
        self._solved = SolvedProduct({}, [], {})

    def fold(self, product: str, hessian: Tensor, too_few: bool) -> None:
        """Scale the inputs of a product by the solver's transform, for the second moments of the original's inputs."""
        transform, block = self._solver.transform, self.state.block
        source = block.spec.input_source(product)
        if transform is None or source is None or too_few:  # no operation before it can absorb a scale, or little known
            return
        linear, factor = block.products[product], self._factors.get(product)
        grid = self._solver.grid(self._blocks.packings[linear.specs[0].name])
        scaled = hessian if factor is None else hessian / torch.outer(factor, factor)
        # The error of plain rounding as if columns were not scaled: scales are a part of the method.
        for spec, part in zip(linear.specs, _parts(linear), strict=True):
            self._rounding[spec.name] = self._rounding_error(part, self._blocks.packings[spec.name], scaled, factor)
        with reduced_precision(scaled.device):  # scales that differ by less than its error are equally good
            scale = transform.choose_scale(linear.weight(), grid, scaled, source)
        if scale is None:
            return
        changed, used = transform.fold(block, product, scale, self._blocks.model.stored_dtype)
        self.changed |= changed
        self._scales[product] = used if factor is None else used * factor
        _rescale_outputs(self._outputs, block, {product: scale})

    def _rounding_error(self, weight: Tensor, packing: Packing, hessian: Tensor, factor: Tensor | None) -> float:
        # The comparison is with rounding the source's weights, whose columns have no factors.
        if factor is not None:
            weight, hessian = weight / factor, hessian * torch.outer(factor, factor)
        return rounding_error(weight, self._solver.grid(packing), hessian)

    def subject(self, product: str) -> CopyInput:
        return CopyInput(self.state, self._scales.get(product))

    def solve(self, product: str, observed: Observed) -> None:
        linear, factor = self.state.block.products[product], self._factors.get(product)
        packing = self._blocks.packings[linear.specs[0].name]
        weights = {spec.name: part for spec, part in zip(linear.specs, _parts(linear), strict=True)}
        if observed.too_few:
            solved = self._solver.round(weights, packing)
        else:
            outputs = self._outputs.get(moments_name(product))
            solved = self._solver.solve(weights, packing, observed.fitted, observed.held_out, outputs)
        if factor is not None and not observed.too_few:
            hessian = observed.fitted.hessian + observed.held_out.hessian
            for name, weight in weights.items():
                if name not in self._rounding:
                    self._rounding[name] = self._rounding_error(weight, packing, hessian, factor)
        del observed, weights
        trim_heap()
        self._blocks.install(linear, solved.linears)
        self._solved.linears.update(solved.linears)
        self._solved.layers.extend(
            replace(layer, rounding_output_error=self._rounding.get(layer.name, layer.rounding_output_error))
            for layer in solved.layers
        )
        self._solved.shifts.update(solved.shifts)

    def finish(self) -> Solved:
        blocks, model = self._blocks, self._blocks.model
        solved = Solved(self._solved.linears, self.changed, tuple(self._solved.layers))
        if not self._solver.tunes:
            with reduced_precision(model.placement.device):
                finish_block(model, self.state, blocks.original.exact)
            return solved
        del self.state
        block = model.block(self._index)
        restore(block, solved.changed)
        dtype, shifts = self._solver.scale_dtype, self._solved.shifts
        tunable = TunableBlock(block, solved, blocks.packings, dtype, model.stored_dtype, shifts)
        exact, streams = blocks.original.exact, (blocks.stream, blocks.original.stream)
        device, moments = model.placement.device, self._moments.stream
        solved = tune_block(tunable, exact, *streams, self._index, device, moments, blocks.side_inputs)
        blocks.advance(self._index, solved)
        return solved


def solve_copies_of_block(solvers: Sequence[BlockSolver], index: int) -> list[Solved]:
    """Quantize the next block of copies of one original, or after the last one the head."""
    original = solvers[0].original
    if index == original.model.config.layers:
        return [solver.solve_head() for solver in solvers]
    block = original.model.block(index)
    copies: list[_CopyOfBlock] = []
    for solver in solvers:
        copies.append(_CopyOfBlock(solver, index, any(copy.is_balanced for copy in copies)))
    if any(solver.solver.transform is not None for solver in solvers):
        for product, hessian, too_few in original.hessians(block):
            for copy in copies:
                copy.fold(product, hessian, too_few)
    entered = original.observed(block)
    for product in solvers[0].packed_products(block):
        subjects = [copy.subject(product) for copy in copies]
        observed = observe_each(original.model, subjects, entered, product, original.exact)
        for copy in copies:
            copy.solve(product, observed.pop(0))
    del block, entered, subjects  # before a copy is tuned
    return [copy.finish() for copy in copies]


def _rescale_outputs(outputs: dict[str, Tensor], block: Block, scales: Mapping[str, Tensor]) -> None:
    # A row that was divided has gradients that are multiplied.
    for product, scale in scales.items():
        source = block.spec.input_source(product)
        if isinstance(source, OutputRows) and source.product in outputs:
            outputs[source.product] = rescaled(outputs[source.product], source, scale)


def _parts(linear: Linear) -> tuple[Tensor, ...]:
    return torch.split(linear.weight(), [spec.out_features for spec in linear.specs])


@dataclass(frozen=True)
class CopyTask:
    """The blocks of a copy to solve. `sink` receives each; `work` stores them, so that a later run continues."""

    blocks: BlockSolver
    sink: Sink
    work: WorkFolder | None = None

    def resume(self, index: int, note: ReportNote) -> Solved | None:
        """Return the block that an earlier run has solved, if there is one, after advancing the copy over it."""
        solved = None if self.work is None else self.work.load(index)
        if solved is not None and self.work is not None:
            if index == 0:
                note(f"resuming unfinished work in {self.work.folder}")
            self.blocks.resume(index, solved)
        return solved

    def store(self, index: int, solved: Solved, is_new: bool) -> None:
        if self.work is not None and is_new:
            self.work.save(index, solved)
        self.sink(solved)


def quantize_blocks(
    blocks: BlockSolver,
    sink: Sink,
    work: WorkFolder | None = None,
    callbacks: Callbacks = Callbacks(),  # noqa: B008  # frozen
) -> tuple[Layer, ...]:
    return solve_copies([CopyTask(blocks, sink, work)], callbacks)[0]


def solve_copies(
    tasks: Sequence[CopyTask],
    callbacks: Callbacks = Callbacks(),  # noqa: B008  # frozen
) -> list[tuple[Layer, ...]]:
    """Solve all blocks of copies of one original, or load those that their work has, and save the others there.

    While a block is solved the one before it is written, and the one after it is read ahead.
    """
    layers: list[list[Layer]] = [[] for _ in tasks]
    progress, note = callbacks.progress, callbacks.note
    original, count = tasks[0].blocks.original, max(task.blocks.count for task in tasks)
    resumed = 0  # blocks that need no solving: they take less time, so they are a stage of their own
    with ThreadPoolExecutor(1) as background:
        written: list[Future[None]] = []
        for index in range(count):
            if index + 1 < original.model.config.layers:
                background.submit(original.model.prefetch, index + 1)
            active = [place for place, task in enumerate(tasks) if index < task.blocks.count]
            resumable = ((place, tasks[place].resume(index, note)) for place in active)
            known = {place: solved for place, solved in resumable if solved is not None}
            missing = [place for place in active if place not in known]
            if missing:
                if index == resumed:
                    if resumed:
                        note(f"resumed: {resumed} of {count} blocks were finished by an earlier run")
                    progress("quantizing blocks", 0, count - resumed)
                new = solve_copies_of_block([tasks[place].blocks for place in missing], index)
                known.update(zip(missing, new, strict=True))
            else:
                if index < original.model.config.layers:
                    original.advance(original.model.block(index), original.stream, original.side_inputs)
                resumed += resumed == index
            for write in written:
                write.result()
            written = [background.submit(tasks[place].store, index, known[place], place in missing) for place in active]
            for place in active:
                layers[place] += known[place].layers
            if index >= resumed:
                progress("quantizing blocks", index + 1 - resumed, count - resumed)
            else:
                progress("resuming blocks", index + 1, count)
        if resumed == count:
            note("resumed: all blocks were finished by an earlier run")
        for write in written:
            write.result()
    return [tuple(solved) for solved in layers]
