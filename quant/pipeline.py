"""Quantizes the model of a folder into a new folder, with one linear or one block in memory at a time.

The result is opened again, measured and described in `mycli.json`, and appears by one rename.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mycli.quant.calibration.hessian import HELD_OUT_EVERY
from mycli.quant.calibration.output_moments import LayerMoments, output_moments
from mycli.quant.calibration.sampler import Calibration
from mycli.quant.evaluate import STREAM_BYTES
from mycli.quant.layer_streaming import RememberedModel, StreamedModel
from mycli.quant.output import model_card
from mycli.quant.output.model_card import Layer, Size, Tuning
from mycli.quant.output.output_work import OutputWork
from mycli.quant.output.tensor_writer import TensorWriter, write_mtp_head
from mycli.quant.output.work_folder import Solved, WorkFolder, require_same_run
from mycli.quant.planning.memory import Need
from mycli.quant.planning.mixed_precision import WINDOWS, Share, allocate, measure_shares
from mycli.quant.planning.plan import Plan, QuantizationPlan, check_resources, plan_low_copy
from mycli.quant.progress import ReportNote, ReportProgress, ignore, silent
from mycli.quant.quality_report import Original, QualityReport, choose_head, measure_result
from mycli.quant.recipe import Recipe
from mycli.quant.solving.blockwise import BlockSolver, quantize_blocks
from mycli.quant.solving.linear_solver import TOO_FEW_TOKENS, LinearSolver
from mycli.quant.solving.tensorwise import quantize_tensors
from mycli.quant.source_weights import SourceWeights
from mycli.quant.tuning.end_to_end import tune_scales
from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.writer import CheckpointWriter
from mycli.runtime.device.placement import Placement, torch_dtype
from mycli.runtime.device.system import trim_heap
from mycli.runtime.errors import ResourceError, UsageError
from mycli.runtime.utils.units import human_bytes, pluralize


class SharedWork:
    """The parts that quantizations of one model share; each is computed by the first that needs it."""

    # Not the Hessians: every copy is calibrated on its own quantized inputs, so that its bytes are those of a single
    # run. On two cores they are most of the time.

    def __init__(self, remembers: bool = False, digests: dict[str, Any] | None = None) -> None:
        """`remembers`: keep the moments and residual streams of the source that copies are solved and measured with.

        digests: of the source's files, where they are known.
        """
        self._model = RememberedModel if remembers else StreamedModel
        self._remembers = remembers
        self._calibrations: dict[tuple[object, ...], Calibration] = {}
        self._moments: dict[tuple[object, ...], list[LayerMoments]] = {}
        self._digests = digests
        self._original: Original | None = None

    def calibration(self, work: QuantizationPlan) -> Calibration:
        key = self._text(work)
        if key not in self._calibrations:
            self._calibrations[key] = work.calibration(work.recipe.samples, work.recipe.seed)
        return self._calibrations[key]

    def moments(self, work: QuantizationPlan, model: StreamedModel, progress: ReportProgress) -> list[LayerMoments]:
        """The output moments of `model`, the source, on the calibration windows."""
        key = (*self._text(work), model.at_once)
        moments = self._moments.get(key)
        if moments is None:
            moments = output_moments(model, self.calibration(work).windows, work.recipe.seed, progress)
            # Copies are measured with them in memory, which their plans do not count.
            if self._remembers and sum(layer.nbytes for layer in moments) <= STREAM_BYTES:
                self._moments[key] = moments
        return moments

    def _text(self, work: QuantizationPlan) -> tuple[object, ...]:
        return work.text, work.recipe.samples, work.seq, work.recipe.seed

    @contextmanager
    def digests(self, folder: ModelFolder) -> Iterator[Future[dict[str, Any]]]:
        if self._digests is not None:
            known: Future[dict[str, Any]] = Future()
            known.set_result(self._digests)
            yield known
            return
        with model_card.digests_in_background(folder.source_files()) as digests:
            yield digests
            self._digests = digests.result()

    def original(self, work: QuantizationPlan, placement: Placement, *, whole: bool) -> Original:
        at_once = work.need.at_once
        if self._original is None or self._original.model.at_once != at_once:
            self._original = Original(self._model(work.folder, placement, at_once), work.memory_limit, whole=whole)
        return self._original


COLLAPSED_KL = 1.0  # nats: such a model writes something else


@dataclass(frozen=True)
class Outcome:
    """A quantized model: `layers` in order of execution, `notes` for the user."""

    folder: Path
    size: Size
    layers: tuple[Layer, ...]
    report: QualityReport
    notes: tuple[str, ...] = ()

    @property
    def fallbacks(self) -> int:
        return sum(layer.fallback is not None for layer in self.layers)


def allocated(work: QuantizationPlan, placement: Placement, folder: Path, progress: ReportProgress = silent) -> Recipe:
    """The recipe with widths chosen for its `target_bpw`, from a temporary copy of one low width next to `folder`."""
    target = work.recipe.target_bpw
    assert target is not None
    copy = plan_low_copy(work, placement.device.type == "cuda")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".widths-", dir=folder.parent) as name:
        # Rescaled weights could not be compared with the original's.
        shares = copy_shares(copy, Path(name) / "low", placement, work.need.at_once, progress, balances=False)
    return replace(work.recipe, widths=allocate(shares, target, copy.recipe.bits))


def copy_shares(
    copy: QuantizationPlan,
    target: Path,
    placement: Placement,
    at_once: int,
    progress: ReportProgress,
    *,
    balances: bool = True,
) -> list[Share]:
    """Write a temporary copy of one low width to `target`; return what each product's rounding adds to the loss."""
    quantize(copy, target, placement, progress=progress, balances=balances)
    trim_heap(mmap_threshold=4 << 20)
    windows = copy.calibration(copy.recipe.samples, copy.recipe.seed).windows
    chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(copy.recipe.seed))[:WINDOWS]
    folders = (copy.folder, open_model_folder(target))
    original, rounded = (StreamedModel(folder, placement, at_once) for folder in folders)
    return measure_shares(original, rounded, windows[chosen], progress)


def quantize(
    work: QuantizationPlan,
    target: Path,
    placement: Placement,
    *,
    overwrite: bool = False,
    work_folder: Path | None = None,
    restart: bool = False,
    progress: ReportProgress = silent,
    note: ReportNote = ignore,
    shared: SharedWork | None = None,
    in_place: bool = False,
    balances: bool = True,
) -> Outcome:
    """Carry out a plan; `placement` is where to solve, and where and in which dtype to measure.

    Nothing appears at `target` before everything is written, measured and flushed. Finished blocks are stored in
    `work_folder` (default: `default_work_folder`) until then, and an interrupted run continues from there unless
    `restart`. in_place: finished parts are stored in the output itself, so that the disk needs its size only; not for
    recipes that tune. balances: outlying columns may be rescaled. Raises what reading, solving and measuring raise, and
    UsageError or ResourceError from `check_resources`.
    """
    check_resources(work, target, overwrite=overwrite)
    recipe, folder, shared = work.recipe, work.folder, shared or SharedWork()
    with memory_errors(work.need), ExitStack() as stack:
        calibration = shared.calibration(work) if recipe.needs_data else None
        if recipe.tune and calibration is not None and len(calibration.windows) < HELD_OUT_EVERY:
            message = f"tuning needs at least {HELD_OUT_EVERY} calibration windows, one held out"
            raise UsageError(f"{message}; there are {len(calibration.windows)}", code="more-samples")
        finished_in = work_folder or default_work_folder(target)
        run = (
            {}
            if calibration is None
            else model_card.identify(asdict(recipe), calibration, placement, work.need.at_once)
        )
        if not restart:
            require_same_run(finished_in, run)  # now and not only below: hashing the source may take minutes
        origin = stack.enter_context(shared.digests(folder))
        finished: WorkFolder | None = None
        journal: OutputWork | None = None
        if in_place:
            run = {**(run or model_card.identify_dataless(asdict(recipe))), "source": origin.result()}
            finished = journal = stack.enter_context(OutputWork(finished_in, run, restart=restart))
        writer = stack.enter_context(
            CheckpointWriter(
                target,
                work.tensors,
                overwrite=overwrite,
                stored_name=folder.config.stored_name,
                resumable=None if journal is None else journal.output,
            )
        )
        output = TensorWriter(writer, work.packings, folder.config.dtype)
        if journal is not None:
            journal.attach(writer, output, folder.config)
        solver = LinearSolver.of(recipe, torch_dtype(folder.config.dtype), balances)
        source, names = SourceWeights(folder), [name for name, _ in folder.config.tensors()]
        tuning = None
        if calibration is None:
            layers = quantize_tensors(source, names, solver, output, placement.device, progress, journal)
        else:
            if finished is None:
                run["source"] = origin.result()
                finished = stack.enter_context(WorkFolder(finished_in, run, restart=restart))
            for name in names:
                if not output.is_quantized(name):
                    (journal or output).copy(source, name)
            model = StreamedModel(folder, placement, work.need.at_once, dense=True)
            outputs = None if recipe.hessian == "layer" else shared.moments(work, model, progress)
            blocks: list[Solved] = []  # of a model that is tuned as a whole; others are written one by one
            layers = quantize_blocks(
                BlockSolver(model, work.packings, solver, calibration.windows, outputs=outputs),
                blocks.append if recipe.tune else output.write_block if journal is None else _is_written,
                finished,
                progress,
                note,
            )
            if recipe.tune:
                tuning = _tune(model, blocks, output, calibration.windows, recipe.seed, progress)
            del model
        if folder.mtp_head is not None:
            write_mtp_head(folder.mtp_head, writer)
        for name, data in folder.companions().items():
            writer.add_file(name, data)
        result = _opened(folder, output, writer)
        measured = QualityReport()
        if work.report != "none":
            original = shared.original(work, placement, whole=not in_place)
            head = choose_head(original, result, work.report, progress) if work.chooses_head else None
            if head is not None and not head.kl.packed:
                work = work.with_dense_head()
                result = _with_dense_head(work, writer)
                layers = tuple(layer for layer in layers if layer.name in work.packings)
            measured = measure_result(original, result, work.report, progress, head=head)
        files = model_card.digests(path for path in writer.folder.iterdir() if path.is_file())
        record = model_card.encode(
            recipe={**asdict(recipe), "group": "channel" if recipe.group is None else recipe.group},
            calibration=calibration,
            source=work.source,
            stored=work.stored,
            adapter=folder.adapter,
            size=work.size,
            layers=layers,
            tuning=tuning,
            card=measured.record,
            source_files=origin.result(),
            files=files,
        )
        writer.add_file(model_card.CARD_FILE, record)
        writer.finish()
        if finished is not None:
            finished.clear()
    notes = (*source_notes(work, calibration, "copied unquantized"), *result_notes(layers, tuning, measured))
    return Outcome(target, work.size, layers, measured, notes)


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


def _tune(
    model: StreamedModel,
    blocks: list[Solved],
    output: TensorWriter,
    windows: Tensor,
    seed: int,
    progress: ReportProgress,
) -> Tuning:
    """Tune the scales and gains of all `blocks`, write them and empty the list: it holds the codes of a whole model."""
    tuned = tune_scales(model, blocks, output.packings, torch_dtype(model.config.dtype), windows, seed, progress)
    blocks.clear()
    for block in tuned.blocks:
        output.write_block(block)
    return tuned.kl


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


def default_work_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.work")


def _config(folder: ModelFolder, output: TensorWriter) -> bytes:
    config, packings = folder.config, output.packings
    inner = (linear for spec in config.layer_specs for linear in spec.unquantized)
    dense = (config.head(), *config.dense_linears(), *inner)
    ignored = [linear.name for linear in dense if linear.name not in packings]
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
