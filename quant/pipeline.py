"""Quantizes the model of a folder into a new folder, with one linear or one block in memory at a time.

The result is opened again, measured and described in `mycli.json`, and appears by one rename.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mycli.quant.calibration.hessian import HELD_OUT_EVERY
from mycli.quant.calibration.output_moments import LayerMoments
from mycli.quant.calibration.sampler import Calibration
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.output import model_card
from mycli.quant.output.model_card import Layer, Size, Tuning
from mycli.quant.output.output_work import OutputWork
from mycli.quant.output.tensor_writer import TensorWriter, write_mtp_head
from mycli.quant.output.work_folder import Solved, WorkFolder, check_work_folder
from mycli.quant.planning.grouping import disk_of_groups, sum_of_needs
from mycli.quant.planning.memory import Need
from mycli.quant.planning.mixed_precision import WINDOWS, Share, add_shares, allocate, measure_shares, width_units
from mycli.quant.planning.plan import Plan, QuantizationPlan, check_resources, plan_low_copy, require_disk
from mycli.quant.planning.target import OutputTarget
from mycli.quant.progress import Callbacks, ReportProgress, silent
from mycli.quant.quality_report import QualityReport, choose_head, measure_result
from mycli.quant.recipe import Recipe
from mycli.quant.shared_work import SharedWork
from mycli.quant.solving.blockwise import BlockSolver, CopyTask, OriginalBlocks, solve_copies
from mycli.quant.solving.linear_solver import TOO_FEW_TOKENS, LinearSolver
from mycli.quant.solving.tensorwise import quantize_tensors
from mycli.quant.source_weights import SourceWeights
from mycli.quant.tuning.end_to_end import can_change_codes, tune_model
from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.writer import CheckpointWriter
from mycli.runtime.device.placement import Placement, torch_dtype
from mycli.runtime.device.system import trim_heap
from mycli.runtime.errors import ResourceError, UsageError
from mycli.runtime.utils.atomic_folder import Staging
from mycli.runtime.utils.units import human_bytes, pluralize

COLLAPSED_KL = 1.0  # nats: such a model writes something else


@dataclass(frozen=True)
class Outcome:
    """A quantized model: `layers` in order of execution, `notes` for the user."""

    folder: Path
    size: Size
    layers: tuple[Layer, ...]
    report: QualityReport
    notes: tuple[str, ...] = ()
    seconds: float = 0.0  # to make it, with an equal part of the time of copies that were solved together

    @property
    def fallbacks(self) -> int:
        return sum(layer.fallback is not None for layer in self.layers)


def choose_widths(
    work: QuantizationPlan, placement: Placement, folder: Path, progress: ReportProgress = silent
) -> Recipe:
    """Return the recipe with widths for its `target_bpw`, measured on a copy of one low width next to `folder`."""
    target = work.recipe.target_bpw
    assert target is not None
    copy = plan_low_copy(work)
    shares = copy_shares(copy, folder, placement, work.need.at_once, progress)
    units = width_units(work.config)
    chosen = allocate([add_shares([shares[place] for place in unit]) for unit in units], target, copy.recipe.bits)
    widths = {place: bits for unit, bits in zip(units, chosen, strict=True) for place in unit}
    return replace(work.recipe, widths=tuple(widths[place] for place in range(len(shares))))


def copy_shares(
    copy: QuantizationPlan, target: Path, placement: Placement, at_once: int, progress: ReportProgress
) -> list[Share]:
    """Return what each product's rounding adds to the loss, measured on a temporary copy of one low width."""
    # The copy lies next to `target`. That of a killed run is removed by the next one for the same target.
    with Staging(target.with_name(f"{target.name[:100]}.widths"), 0) as temporary:
        quantize(copy, OutputTarget(temporary.folder / "low"), placement, Callbacks(progress))
        trim_heap(mmap_threshold=4 << 20)
        windows = copy.calibration(copy.recipe.samples, copy.recipe.seed).windows
        chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(copy.recipe.seed))[:WINDOWS]
        folders = (copy.folder, open_model_folder(temporary.folder / "low"))
        original, rounded = (StreamedModel(folder, placement, at_once) for folder in folders)
        balanced = copy.balances and copy.recipe.needs_data  # methods without data balance nothing
        return measure_shares(original, rounded, windows[chosen], progress, balanced=balanced)


def quantize(
    work: QuantizationPlan,
    target: OutputTarget,
    placement: Placement,
    callbacks: Callbacks = Callbacks(),  # noqa: B008  # frozen
    *,
    shared: SharedWork | None = None,
    in_place: bool = False,
) -> Outcome:
    """Carry out a plan; `placement` is where to solve, and where and in which dtype to measure.

    Nothing appears at `target` before everything is written, measured and flushed. Finished blocks are stored in its
    work folder until then, and an interrupted run continues from there unless `target.restart`. in_place: finished
    parts are stored in the output itself, so that the disk needs its size only; not for recipes that tune. Raises what
    reading, solving and measuring raise, and UsageError or ResourceError from `check_resources`.
    """
    began = time.monotonic()
    check_resources(work, target, None if in_place else target.work_folder)
    with memory_errors(work.need), ExitStack() as stack:
        copy = _Copy(stack, work, target, placement, shared or SharedWork(), in_place=in_place)
        (layers,) = _solved([copy], callbacks)
        return copy.finish(layers, callbacks.progress, began)


def quantize_copies(
    copies: Sequence[tuple[QuantizationPlan, OutputTarget]],
    placement: Placement,
    shared: SharedWork,
    callbacks: Callbacks,
) -> Iterator[Outcome]:
    """Carry out plans that `planning.grouping` has put together, in one pass over the original's blocks."""
    # Each copy has the bytes that `quantize` gives it, and is yielded when it is finished.
    began = time.monotonic()
    for work, target in copies:
        check_resources(work, target)
    require_disk(disk_of_groups([copies]))
    with memory_errors(sum_of_needs(work for work, _ in copies)), ExitStack() as stack:
        opened = [_Copy(stack, work, target, placement, shared) for work, target in copies]
        solved = _solved(opened, callbacks)
        seconds = (time.monotonic() - began) / len(opened)
        for copy, layers in zip(opened, solved, strict=True):
            yield copy.finish(layers, callbacks.progress, time.monotonic() - seconds)


class _Copy:
    """A copy from its first written tensor to its card; `stack` closes its files."""

    def __init__(
        self,
        stack: ExitStack,
        work: QuantizationPlan,
        target: OutputTarget,
        placement: Placement,
        shared: SharedWork,
        *,
        in_place: bool = False,
    ) -> None:
        recipe, folder = work.recipe, work.folder
        self.work, self.placement, self._shared, self._in_place = work, placement, shared, in_place
        self._path = target.path
        self.calibration = shared.calibration(work) if recipe.needs_data else None
        if recipe.tune and self.calibration is not None and len(self.calibration.windows) < HELD_OUT_EVERY:
            message = f"tuning needs at least {HELD_OUT_EVERY} calibration windows, one held out"
            raise UsageError(f"{message}; there are {len(self.calibration.windows)}", code="more-samples")
        run = model_card.identify(asdict(recipe), self.calibration, placement, work.need.at_once)
        if not target.restart and self.calibration is not None:
            check_work_folder(target.work_folder, run)  # now and not only below: hashing the source may take minutes
        self._origin = stack.enter_context(shared.digests(folder))
        self.finished: WorkFolder | None = None
        self.journal: OutputWork | None = None
        if in_place:
            run = {**run, "source": self._origin.result()}
            self.journal = stack.enter_context(OutputWork(target.work_folder, run, restart=target.restart))
            self.finished = self.journal
        self._writer = stack.enter_context(
            CheckpointWriter(
                target.path,
                work.tensors,
                overwrite=target.overwrite,
                stored_name=folder.config.stored_name,
                resumable=None if self.journal is None else self.journal.output,
            )
        )
        self.output = TensorWriter(self._writer, work.packings, folder.config.dtype)
        if self.journal is not None:
            self.journal.attach(self._writer, self.output, folder.config)
        self.solver = LinearSolver.of(recipe, torch_dtype(folder.config.dtype), balances=work.balances)
        self._source, self.names = SourceWeights(folder), [name for name, _ in folder.config.tensors()]
        self._tuning: Tuning | None = None
        self._blocks: list[Solved] = []  # of a model that is tuned as a whole; others are written one by one
        if self.calibration is not None and self.finished is None:
            run["source"] = self._origin.result()
            self.finished = stack.enter_context(WorkFolder(target.work_folder, run, restart=target.restart))

    def solve_without_data(self, progress: ReportProgress) -> tuple[Layer, ...]:
        device = self.placement.device
        return quantize_tensors(self._source, self.names, self.solver, self.output, device, progress, self.journal)

    def prepare(self, model: StreamedModel, progress: ReportProgress) -> list[LayerMoments] | None:
        """Write what is not quantized; return the output moments of the original if the recipe needs them."""
        for name in self.names:
            if not self.output.is_quantized(name):
                (self.journal or self.output).copy(self._source, name)
        return None if self.work.recipe.hessian == "layer" else self._shared.moments(self.work, model, progress)

    def task(self, original: OriginalBlocks, outputs: list[LayerMoments] | None) -> CopyTask:
        sink = self.output.write_block if self.journal is None else _is_written
        blocks = BlockSolver(original, self.work.packings, self.solver, outputs=outputs)
        return CopyTask(blocks, self._blocks.append if self.work.recipe.tune else sink, self.finished)

    def tune(self, model: StreamedModel, windows: Tensor, progress: ReportProgress) -> None:
        """Tune all blocks together, write them and drop them: they are the codes of a whole model."""
        dtype, recipe = torch_dtype(model.config.dtype), self.work.recipe
        tuned = tune_model(
            model, self._blocks, self.output.packings, dtype, windows, recipe.seed, progress, codes=recipe.tune_codes
        )
        self._blocks.clear()
        for block in tuned.blocks:
            self.output.write_block(block)
        self._tuning = tuned.kl

    def finish(self, layers: tuple[Layer, ...], progress: ReportProgress, began: float) -> Outcome:
        """Measure the copy, write its card and let it appear."""
        work, folder, writer, report = self.work, self.work.folder, self._writer, self.work.settings.report
        if folder.mtp_head is not None:
            write_mtp_head(folder.mtp_head, writer)
        for name, data in folder.companions().items():
            writer.add_file(name, data)
        result = _opened(folder, self.output, writer)
        measured = QualityReport()
        if report != "none":
            original = self._shared.original(work, self.placement, whole=not self._in_place)
            head = choose_head(original, result, report, progress) if work.chooses_head else None
            if head is not None and not head.kl.packed:
                work = work.with_dense_head()
                result = _with_dense_head(work, writer)
                layers = tuple(layer for layer in layers if layer.name in work.packings)
            measured = measure_result(original, result, report, progress, head=head)
        files = model_card.digests(filter(Path.is_file, writer.folder.rglob("*")), writer.folder)
        record = model_card.encode(
            recipe=work.recipe.record,
            calibration=self.calibration,
            source=work.source,
            stored=work.stored,
            adapter=folder.adapter,
            size=work.size,
            layers=layers,
            tuning=self._tuning,
            card=measured.record,
            source_files=self._origin.result(),
            files=files,
        )
        writer.add_file(model_card.CARD_FILE, record)
        writer.finish()
        if self.finished is not None:
            self.finished.clear()
        notes = [*source_notes(work, self.calibration, "copied unquantized")]
        if work.recipe.tune_codes and self.calibration is not None:
            notes += code_notes(len(self.calibration.windows))
        notes += result_notes(layers, self._tuning, measured)
        return Outcome(self._path, work.size, layers, measured, tuple(notes), time.monotonic() - began)


def _solved(copies: Sequence[_Copy], callbacks: Callbacks) -> list[tuple[Layer, ...]]:
    first, progress = copies[0], callbacks.progress
    if first.calibration is None:
        return [copy.solve_without_data(progress) for copy in copies]
    model = StreamedModel(first.work.folder, first.placement, first.work.need.at_once, dense=True)
    outputs = [copy.prepare(model, progress) for copy in copies]
    original = OriginalBlocks(model, first.calibration.windows, first.work.need.keeps_inputs)
    tasks = [copy.task(original, moments) for copy, moments in zip(copies, outputs, strict=True)]
    layers = solve_copies(tasks, callbacks)
    del original, tasks, outputs
    for copy in copies:
        if copy.work.recipe.tune:
            copy.tune(model, first.calibration.windows, progress)
    return layers


def _opened(folder: ModelFolder, output: TensorWriter, writer: CheckpointWriter) -> ModelFolder:
    # As every reader will open it, while it can still be discarded.
    writer.add_file("config.json", _config(folder, output))
    result = open_model_folder(writer.folder)
    result.checked_manifest()
    return result


def _with_dense_head(work: QuantizationPlan, writer: CheckpointWriter) -> ModelFolder:
    """Replace the packed head of a written result by the source's."""
    folder = work.folder
    output = TensorWriter(writer, work.packings, folder.config.dtype)
    writer.replan(work.tensors)
    output.copy(SourceWeights(folder), f"{folder.config.head().name}.weight")
    return _opened(folder, output, writer)


def _is_written(solved: Solved) -> None:
    """Do nothing with a block that its work folder has written to the output."""


@contextmanager
def memory_errors(need: Need) -> Iterator[None]:
    """Raise ResourceError for running out of memory in spite of the plan."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        # torch has its own exception for GPU memory only.
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        raise ResourceError(
            f"out of memory, though {human_bytes(max(need.host, need.device))} should have been enough",
            code="run-again-or-fewer-samples",
        ) from error


def _config(folder: ModelFolder, output: TensorWriter) -> bytes:
    config, packings = folder.config, output.packings
    dense = (config.head(), *config.unquantized_linears())
    # By both names: readers compare them with their modules, which have the checkpoints' names in published code and
    # vLLM's EXAONE, and the declaration's in transformers.
    ignored = [name for linear in dense if linear.name not in packings for name in config.module_names(linear.name)]
    packings = {name: packing for linear, packing in packings.items() for name in config.module_names(linear)}
    ignored += ["re:^mtp[.]"] if folder.mtp_head is not None else []
    values = {name: value for name, value in folder.raw.values.items() if name != "quantization"}
    values["quantization_config"] = formats.writable(packings).write_quantization(packings, ignored, config.dtype)
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def source_notes(work: Plan, calibration: Calibration | None, mtp_head: str) -> Iterator[str]:
    """Yield notes about a packed source, too little calibration text, and what becomes of an MTP head."""
    if work.stored is not None:
        yield f"the source is already quantized ({work.stored}); its losses remain"
    if work.folder.mtp_head is not None:
        yield f"the MTP head (mtp.*) is {mtp_head}"
    widest = max(work.config.hidden_size, work.config.intermediate_size)
    if calibration is not None and calibration.tokens < widest:
        yield f"calibrated on {calibration.tokens} tokens, fewer than the {widest} inputs of a layer; use more"


def code_notes(windows: int) -> Iterator[str]:
    if not can_change_codes(windows):
        yield f"training all blocks changed no codes: {pluralize(windows, 'calibration window')} are too few"


def result_notes(layers: tuple[Layer, ...], tuning: Tuning | None, report: QualityReport) -> Iterator[str]:
    """Yield notes about fallbacks, inputs that were never used, and collapse."""
    for reason, count in sorted(Counter(layer.fallback for layer in layers if layer.fallback).items()):
        names = [layer.name for layer in layers if layer.fallback == reason]
        some = f" ({', '.join(names[:3])}{', ...' if count > 3 else ''})" if reason == TOO_FEW_TOKENS else ""
        yield f"{count} of {len(layers)} layers were rounded to nearest: {reason}{some}"
    if tuning is not None:
        yield f"tuning: mean KL of held-out calibration windows {tuning.before:.4g} → {tuning.after:.4g}"
    dead = [layer for layer in layers if layer.dead_columns]
    if dead:
        most = max(dead, key=lambda layer: layer.dead_columns)
        some = pluralize(len(dead), "layer")
        yield f"{some} with inputs that calibration never used, at most {most.dead_columns}, in {most.name}"
    if report.kl is not None and report.kl > COLLAPSED_KL:
        yield f"the model has collapsed (mean KL {report.kl:.2g}); it needs more bits"
    if report.calls is not None and report.calls.skipped is not None:
        yield f"replies with calls were not measured: {report.calls.skipped}"
