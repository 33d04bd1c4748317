"""Quantizes a model into one GGUF file, block by block; the file is measured and appears by one rename.

Its record lies next to it, NAME.mycli.json for NAME.gguf, with the fields of mycli.json in a folder.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mycli.quant.ggml.file import GgufTensors
from mycli.quant.ggml.linear_solver import BlockTypeSolver
from mycli.quant.ggml.plan import GgufPlan, check_gguf_resources
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.output import model_card
from mycli.quant.output.model_card import Layer
from mycli.quant.output.work_folder import Solved, WorkFolder, check_work_folder
from mycli.quant.pipeline import Outcome, memory_errors, result_notes, source_notes
from mycli.quant.planning.target import OutputTarget
from mycli.quant.progress import Callbacks, ReportProgress
from mycli.quant.quality_report import Original, QualityReport, measure_result
from mycli.quant.solving.blockwise import BlockSolver, OriginalBlocks, quantize_blocks
from mycli.quant.source_weights import SourceWeights
from mycli.runtime.checkpoint.formats import EMBEDDING
from mycli.runtime.checkpoint.gguf.blocks import dequantize_blocks
from mycli.runtime.checkpoint.gguf.folder import GgufFolder
from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement, torch_dtype
from mycli.runtime.hub.store import gguf_record
from mycli.runtime.utils.files import disk_errors, write_atomic


@dataclass(frozen=True)
class _Output:
    """Writes tensors of the plan to its file."""

    work: GgufPlan
    file: GgufTensors

    def copy(self, source: SourceWeights, tensor: str) -> None:
        dtype = TYPES_BY_NAME[self.work.layout.kinds[tensor]].dtype
        assert dtype is not None
        values, change = source.read(tensor), self.work.layout.places[tensor].rule.change
        values = values if change is None else change.store(values.float())
        self.file.write(tensor, _rows(values.to(torch_dtype(dtype))))

    def write_block(self, solved: Solved) -> None:
        for name, quantized in solved.linears.items():
            self.file.write(f"{name}.weight", quantized.codes.cpu())


def _rows(values: Tensor) -> Tensor:
    values = values.reshape(values.shape or (1,))
    return values.contiguous().view(len(values), -1).view(torch.uint8)


def quantize_gguf(
    work: GgufPlan,
    target: OutputTarget,
    placement: Placement,
    callbacks: Callbacks = Callbacks(),  # noqa: B008  # frozen
) -> Outcome:
    """Carry out a plan; arguments, errors and resumption are those of `pipeline.quantize`."""
    check_gguf_resources(work, target)
    folder, at_once = work.folder, work.need.at_once
    with memory_errors(work.need), ExitStack() as stack:
        calibration = work.calibration(work.recipe.samples, work.recipe.seed)
        run = model_card.identify(work.recipe.record, calibration, placement, at_once)
        if not target.restart:
            check_work_folder(target.work_folder, run)
        origin = stack.enter_context(model_card.digests_in_background(folder.source_files(), folder.path))
        file = stack.enter_context(work.layout.writer(target.path, target.overwrite))
        solver, output, source = BlockTypeSolver(work.layout), _Output(work, file), SourceWeights(folder)
        for name in work.layout.kinds:
            if name.removesuffix(".weight") not in work.packings:
                output.copy(source, name)
        layers, embedding = _embeddings(work, solver, source, output)
        run = {**run, "source": origin.result()}
        finished = stack.enter_context(WorkFolder(target.work_folder, run, restart=target.restart))
        model = StreamedModel(folder, placement, at_once, dense=True)
        entering = OriginalBlocks(model, calibration.windows, work.need.keeps_inputs)
        blocks = BlockSolver(entering, work.packings, solver, embedding)
        layers += quantize_blocks(blocks, output.write_block, finished, callbacks)
        del model, entering, blocks
        measured = _measure(work, file.file.partial, placement, callbacks.progress)
        record = model_card.encode(
            recipe={**work.recipe.record, "format": "gguf"},
            calibration=calibration,
            source=work.source,
            stored=work.stored,
            adapter=folder.adapter,
            size=work.size,
            layers=layers,
            tuning=None,
            card=measured.record,
            source_files=origin.result(),
            files={target.path.name: next(iter(model_card.digests([file.file.partial]).values()))},
        )
        with disk_errors(target.path):
            # The record first: a file without one would count as another program's.
            write_atomic(gguf_record(target.path), record)
        file.file.finish()
        finished.clear()
    open_model_folder(target.path)
    head = "left out: GGUF has no place for it here"
    notes = (*source_notes(work, calibration, head), *result_notes(layers, None, measured))
    return Outcome(target.path, work.size, layers, measured, notes)


def _measure(work: GgufPlan, file: Path, placement: Placement, progress: ReportProgress) -> QualityReport:
    # Opened as every reader will open it, while it can still be discarded.
    result = GgufFolder.open_file(file)
    result.checked_manifest()
    if work.settings.report == "none":
        return QualityReport()
    original = Original(StreamedModel(work.folder, placement, work.need.at_once), work.settings.max_ram)
    return measure_result(original, result, work.settings.report, progress, same_head=False)


def _embeddings(
    work: GgufPlan, solver: BlockTypeSolver, source: SourceWeights, output: _Output
) -> tuple[tuple[Layer, ...], Tensor | None]:
    # Round the tables that no block or head solves; also returns the embedding as it was rounded. A tied one is solved
    # as the head after all blocks, when the inputs of the head are known.
    config, layers, embedding = work.config, [], None
    tables = [] if config.tie_embeddings else [EMBEDDING]
    tables += [config.per_layer_table().name] if config.per_layer_width else []
    for name in tables:
        if name not in work.packings:
            continue
        blocks, error = solver.round_tensor(name, source.read(f"{name}.weight"))
        output.file.write(f"{name}.weight", blocks)
        kind = solver.kind(name).name
        layers.append(Layer(name, kind, error))
        if name == EMBEDDING:
            embedding = dequantize_blocks(blocks, kind).to(torch_dtype(config.dtype))
    return tuple(layers), embedding
