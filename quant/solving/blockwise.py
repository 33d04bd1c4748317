"""Quantizes a model block by block with calibration data: each product sees the inputs of the quantized model.

Within a block products are solved in order of execution (qkv, o, gate_up, down): each is observed after the ones
before it were quantized, and aims at the original's outputs. Then, if the recipe says so, the block is tuned as a
whole.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from mycli.quant.calibration.hessian import (
    HELD_OUT_EVERY,
    ObservedBlock,
    finish_block,
    observe,
    reduced_precision,
    require_finite,
)
from mycli.quant.calibration.output_moments import LayerMoments
from mycli.quant.layer_streaming import StreamedModel, restore
from mycli.quant.output.model_card import Layer
from mycli.quant.output.work_folder import Solved, WorkFolder
from mycli.quant.progress import ReportNote, ReportProgress, ignore, silent
from mycli.quant.rounding.error_compensation import Moments
from mycli.quant.rounding.grid import Quantized
from mycli.quant.rounding.rows import rescaled
from mycli.quant.solving.column_balance import balance
from mycli.quant.solving.linear_solver import LinearSolver, SolvedProduct, rounding_error
from mycli.quant.transforms import TransformModule
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


class BlockSolver:
    """Solves the blocks of one model in order, then its head if that is quantized."""

    # Two copies of a block are on the device at a time, the original and the one being quantized. The residual streams
    # of both models lie on the host and are advanced by every call.

    def __init__(
        self,
        model: StreamedModel,
        packings: Mapping[str, Packing],
        solver: LinearSolver,
        windows: Tensor,
        embedding: Tensor | None = None,
        outputs: Sequence[LayerMoments] | None = None,
    ) -> None:
        """`windows`: calibration tokens int64 [samples, seq]; `embedding`: the table of the quantized model.

        outputs: `output_moments` of the model.
        """
        self.model = model
        self.packings = packings
        self._solver = solver
        self._outputs = outputs
        self._original_stream = model.embed(windows)
        self._stream = self._original_stream.clone() if embedding is None else model.embed(windows, embedding)
        self._side_inputs = model.side_inputs(windows)
        self._original_side_inputs = None if self._side_inputs is None else self._side_inputs.twin()
        self._context = model.context(windows.shape[1])
        # Solvers see keys and values unrounded: a cache in another dtype may serve the model later.
        self._exact = replace(self._context, attention=PromptAttention())

    @property
    def count(self) -> int:
        """The number of calls that finish the model: one per block, one for a quantized head."""
        return self.model.config.layers + (self._head.name in self.packings)

    @property
    def _head(self) -> LinearSpec:
        # A format that quantizes embeddings solves a tied one as the head that it is.
        head = self.model.config.head()
        return replace(head, name=EMBEDDING) if self.model.config.tie_embeddings else head

    def solve(self, index: int) -> Solved:
        """Quantize the next block, or after the last one the head."""
        model, transform = self.model, self._solver.transform
        if index == model.config.layers:
            return self._solve_head()
        blocks = model.block(index), model.block(index)
        changed, factors = self._balance(blocks)
        quantized = ObservedBlock(blocks[0], self._stream, side_inputs=self._side_inputs)
        original = ObservedBlock(
            blocks[1],
            self._original_stream,
            final=transform is None,  # a transform folds its scales into the original too
            side_inputs=self._original_side_inputs,
        )
        rounding: dict[str, float] = {}
        moments = LayerMoments() if self._outputs is None else self._outputs[index]
        outputs = dict(moments.products)
        _rescale_outputs(outputs, blocks[0], factors)
        if transform is not None:
            folded, rounding, scales = self._fold(transform, quantized, original, factors)
            changed |= folded
            _rescale_outputs(outputs, blocks[0], scales)
        solved, shifts = self._solve_products(quantized, original, changed, rounding, factors, outputs)
        if transform is not None:
            # Read again without the folded scales: the bits must be those of a run that resumes after this block.
            self._advance_original(index)
        if self._solver.tunes:
            del quantized, original
            solved = self._tune(index, solved, shifts, moments.stream)
            self._advance_quantized(index, solved)
        else:
            with reduced_precision(model.placement.device):
                finish_block(model, quantized, self._exact)
        return solved

    def resume(self, index: int, solved: Solved) -> None:
        """Advance past a block that an earlier run solved."""
        if index < self.model.config.layers:
            self._advance_original(index)
            self._advance_quantized(index, solved)

    def _balance(self, blocks: tuple[Block, Block]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        # Of both, by powers of two: the original's outputs stay the same bit for bit.
        if not self._solver.balances:
            return {}, {}
        changed, factors = balance(blocks[0], self.model.stored_dtype)
        if factors:
            balance(blocks[1], self.model.stored_dtype)
        return changed, factors

    def _fold(
        self,
        transform: TransformModule,
        quantized: ObservedBlock,
        original: ObservedBlock,
        factors: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, float], dict[str, Tensor]]:
        # Returns the changed tensors, the error of plain rounding by linear as if its columns were not scaled (rounding
        # scaled weights would be a comparison with a part of the method itself), and the scales by product.
        changed: dict[str, Tensor] = {}
        rounding: dict[str, float] = {}
        scales: dict[str, Tensor] = {}
        for product, linear in quantized.block.products.items():
            # Every product is observed, in order: the streams of later parts are filled by it.
            fitted, held_out, too_few = observe(self.model, quantized, None, product, self._exact)
            source = quantized.block.spec.input_source(product)
            if source is None or too_few:  # no operation before it can absorb a scale, or too little is known
                continue
            grid = self._solver.grid(self.packings[linear.specs[0].name])
            hessian = fitted.hessian + held_out.hessian
            for spec, part in zip(linear.specs, _parts(linear), strict=True):
                packing = self.packings[spec.name]
                rounding[spec.name] = self._rounding_error(part, packing, hessian, factors.get(product))
            scale = transform.choose_scale(linear.weight(), grid, hessian, source)
            if scale is not None:
                scales[product] = scale
                for state in (quantized, original):
                    changed |= transform.fold(state.block, product, scale, self.model.stored_dtype)
        return changed, rounding, scales

    def _rounding_error(self, weight: Tensor, packing: Packing, hessian: Tensor, factor: Tensor | None) -> float:
        # The comparison is with rounding the source's weights, whose columns have no factors.
        if factor is not None:
            weight, hessian = weight / factor, hessian * torch.outer(factor, factor)
        return rounding_error(weight, self._solver.grid(packing), hessian)

    def _solve_products(
        self,
        quantized: ObservedBlock,
        original: ObservedBlock,
        changed: Mapping[str, Tensor],
        rounding: dict[str, float],
        factors: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
    ) -> tuple[Solved, dict[str, Tensor]]:
        block = SolvedProduct({}, [], {})
        for product, linear in quantized.block.products.items():
            packing = self.packings[linear.specs[0].name]
            observed = observe(self.model, quantized, original, product, self._exact)
            weights = {spec.name: part for spec, part in zip(linear.specs, _parts(linear), strict=True)}
            if observed.too_few:
                solved = self._solver.round(weights, packing)
            else:
                solved = self._solver.solve(weights, packing, observed.fitted, observed.held_out, outputs.get(product))
            if product in factors and not observed.too_few:
                hessian = observed.fitted.hessian + observed.held_out.hessian
                for name, weight in weights.items():
                    if name not in rounding:
                        rounding[name] = self._rounding_error(weight, packing, hessian, factors[product])
            del observed, weights
            trim_heap()
            self._install(linear, solved.linears)
            block.linears.update(solved.linears)
            block.layers.extend(
                replace(layer, rounding_output_error=rounding.get(layer.name, layer.rounding_output_error))
                for layer in solved.layers
            )
            block.shifts.update(solved.shifts)
        return Solved(block.linears, changed, tuple(block.layers)), block.shifts

    def _tune(self, index: int, solved: Solved, shifts: Mapping[str, Tensor], moments: Tensor | None) -> Solved:
        model = self.model
        block = model.block(index)
        restore(block, solved.changed)
        tunable = TunableBlock(block, solved, self.packings, self._solver.scale_dtype, model.stored_dtype, shifts)
        device = model.placement.device
        return tune_block(tunable, self._exact, self._stream, self._original_stream, index, device, moments)

    @torch.no_grad()
    def _solve_head(self) -> Solved:
        model, head = self.model, self._head
        fitted, held_out = (Moments.zeros(head.in_features, model.placement.device) for _ in range(2))
        for index, (ours, originals) in enumerate(zip(self._stream, self._original_stream, strict=True)):
            x, y = model.normed(ours).float(), model.normed(originals).float()
            require_finite(x)
            with reduced_precision(model.placement.device):
                (held_out if index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else fitted).add(x, y)
        packing, weights = self.packings[head.name], model.weights([head])
        solved = self._solver.solve(weights, packing, fitted.complete(), held_out.complete())
        return Solved(solved.linears, {}, tuple(solved.layers))

    def _advance_original(self, index: int) -> None:
        model = self.model
        with reduced_precision(model.placement.device):
            model.advance(model.block(index), self._original_stream, self._context, self._original_side_inputs)

    def _advance_quantized(self, index: int, solved: Solved) -> None:
        model = self.model
        block = model.block(index)
        restore(block, solved.changed)
        for linear in block.products.values():
            self._install(linear, solved.linears)
        with reduced_precision(model.placement.device):
            model.advance(block, self._stream, self._context, self._side_inputs)

    def _install(self, linear: Linear, solved: Mapping[str, Quantized]) -> None:
        """Replace a weight by the values that every reader computes from its codes."""
        names = [spec.name for spec in linear.specs]
        restored = [self._solver.restore(name, solved[name], self.packings[name]) for name in names]
        linear.replace(torch.cat(restored).to(linear.weight().dtype))


def _rescale_outputs(outputs: dict[str, Tensor], block: Block, scales: Mapping[str, Tensor]) -> None:
    # A row that was divided has gradients that are multiplied.
    for product, scale in scales.items():
        source = block.spec.input_source(product)
        if isinstance(source, OutputRows) and source.product in outputs:
            outputs[source.product] = rescaled(outputs[source.product], source, scale)


def _parts(linear: Linear) -> tuple[Tensor, ...]:
    return torch.split(linear.weight(), [spec.out_features for spec in linear.specs])


def quantize_blocks(
    blocks: BlockSolver,
    sink: Sink,
    work: WorkFolder | None = None,
    progress: ReportProgress = silent,
    note: ReportNote = ignore,
) -> tuple[Layer, ...]:
    """Solve all blocks, or load those that `work` has, and save the others there.

    While a block is solved the one before it is written, by `sink` too, and the one after it is read ahead.
    """
    layers: list[Layer] = []
    resumed = 0  # blocks that need no solving: they take less time, so they are a stage of their own

    def store(index: int, solved: Solved, is_new: bool) -> None:
        if work is not None and is_new:
            work.save(index, solved)
        sink(solved)

    with ThreadPoolExecutor(1) as background:
        written: Future[None] | None = None
        for index in range(blocks.count):
            if index + 1 < blocks.model.config.layers:
                background.submit(blocks.model.prefetch, index + 1)
            loaded = None if work is None else work.load(index)
            if loaded is not None:
                if index == 0 and work is not None:
                    note(f"resuming unfinished work in {work.folder}")
                blocks.resume(index, loaded)
                resumed = index + 1 if resumed == index else resumed
            if loaded is None and index == resumed:
                if resumed:
                    note(f"resumed: {resumed} of {blocks.count} blocks were finished by an earlier run")
                progress("quantizing blocks", 0, blocks.count - resumed)
            solved = loaded or blocks.solve(index)
            if written is not None:
                written.result()
            written = background.submit(store, index, solved, loaded is None)
            layers += solved.layers
            if index >= resumed:
                progress("quantizing blocks", index + 1 - resumed, blocks.count - resumed)
            else:
                progress("resuming blocks", index + 1, blocks.count)
        if resumed == blocks.count:
            note("resumed: all blocks were finished by an earlier run")
        if written is not None:
            written.result()
    return tuple(layers)
