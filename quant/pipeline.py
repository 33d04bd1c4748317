"""From the folder of a model to the folder of its quantized copy, one linear or one block in memory at a time.

What `planning` planned is done: read, solve, pack and write, tensor by tensor, or block by block where the solver wants
data. Then the copy is opened again, measured, described in `mycli.json`, and appears by one rename. Knows no solver by
name and nothing of a terminal.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mycli.quant import model_card, solvers
from mycli.quant.blockwise import UNSEEN, Solver, quantize_blocks
from mycli.quant.calibration.hessian import HELD
from mycli.quant.calibration.sampler import Calibration, bundled, from_file
from mycli.quant.evaluate import Evaluation, cut, evaluate, held_out_text
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.mixed_precision import COPY_WINDOWS, WINDOWS, allocate, low_width, measure_shares
from mycli.quant.model_card import Layer, Size, Tuning
from mycli.quant.planning.plan import (
    QUICK_TOKENS,
    REPORT_CONTEXT,
    QuantizationPlan,
    check_resources,
    plan_quantization,
)
from mycli.quant.progress import ReportProgress, silent
from mycli.quant.recipe import Recipe
from mycli.quant.source_weights import SourceWeights
from mycli.quant.tensorwise import write_linear, write_predictor, write_tensors
from mycli.quant.tuning.end_to_end import tune_scales
from mycli.quant.work_folder import Solved, WorkFolder
from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.reader import CheckpointWriter
from mycli.runtime.device.placement import Placement, torch_dtype
from mycli.runtime.device.system import trim_heap
from mycli.runtime.errors import ResourceError, UsageError
from mycli.runtime.utils.units import human_bytes, pluralize

COLLAPSED_KL = 1.0  # nats: such a model says something else


@dataclass(frozen=True)
class Outcome:
    """What was made. `layers` in order of execution; `card` None where no report was asked for.

    `notes` are for a person: what was unusual, and did not stop the work.
    """

    folder: Path
    size: Size
    layers: tuple[Layer, ...]
    card: Evaluation | None
    notes: tuple[str, ...] = ()

    @property
    def fallbacks(self) -> int:
        """How many layers are plain rounding though more was asked for."""
        return sum(layer.fallback is not None for layer in self.layers)


def allocated(work: QuantizationPlan, placement: Placement, folder: Path, progress: ReportProgress = silent) -> Recipe:
    """The recipe of `work` with the widths of its products chosen for its `target_bpw`.

    A copy of one low width is made in `folder` for it, and removed again.
    """
    target = work.recipe.target_bpw
    assert target is not None
    # Without a transform: rescaled weights cannot be compared with the original's.
    method = solvers.DEFAULT if work.recipe.needs_data else work.recipe.method
    samples = min(work.recipe.samples, COPY_WINDOWS)
    bits = low_width(target, work.recipe.group)
    low = replace(work.recipe, method=method, bits=bits, target_bpw=None, samples=samples, head="keep", tune=False)
    copy = plan_quantization(
        work.source, low, work.text, folder=work.folder, report="none", gpu=placement.device.type == "cuda"
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".widths-", dir=folder.parent) as name:
        quantize(copy, Path(name) / "low", placement, progress=progress)
        trim_heap(mmap_threshold=4 << 20)
        shown = _calibration(copy).windows
        chosen = torch.randperm(len(shown), generator=torch.Generator().manual_seed(low.seed))[:WINDOWS]
        folders = (work.folder, open_model_folder(Path(name) / "low"))
        models = [StreamedModel(each, placement, work.need.at_once) for each in folders]
        shares = measure_shares(models[0], models[1], shown[chosen], progress)
    return replace(work.recipe, widths=allocate(shares, target, bits))


def quantize(
    work: QuantizationPlan,
    target: Path,
    placement: Placement,
    *,
    overwrite: bool = False,
    work_folder: Path | None = None,
    progress: ReportProgress = silent,
) -> Outcome:
    """Do what `plan_quantization` said; `placement` is where to solve, and where and in which dtype to measure.

    Nothing appears at `target` before all is written, measured and flushed. Work with data is kept block by block in
    `work_folder` (a hidden one beside the target) until then, and an interrupted run goes on from there. Raises what
    reading, solving and measuring raise, and UsageError or ResourceError from `check_resources`.
    """
    check_resources(work, target, overwrite=overwrite)
    with memory_errors(work):
        return _quantize(work, target, placement, overwrite, work_folder, progress)


@contextmanager
def memory_errors(work: QuantizationPlan) -> Iterator[None]:
    """Within it, memory that runs out in spite of the plan is a ResourceError."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        # torch has a type of its own for a GPU's memory only.
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        raise ResourceError(
            f"memory ran out, though {human_bytes(max(work.need.host, work.need.device))} should have been enough",
            code="run-again-or-fewer-samples",
        ) from error


def _quantize(
    work: QuantizationPlan,
    target: Path,
    placement: Placement,
    overwrite: bool,
    work_folder: Path | None,
    progress: ReportProgress,
) -> Outcome:
    shown = _calibration(work) if work.recipe.needs_data else None
    if work.recipe.tune and shown is not None and len(shown.windows) < HELD:
        raise UsageError(f"tuning needs {HELD} windows, one of them to judge by", code="more-samples")
    with ExitStack() as stack:
        origin = stack.enter_context(model_card.digests_aside(work.folder.source_files()))
        writer = stack.enter_context(CheckpointWriter(target, work.tensors, overwrite=overwrite))
        kept, tuning = None, None
        if shown is None:
            layers = write_tensors(work, writer, placement.device, progress)
        else:
            run = model_card.identify(work.recipe, shown, origin.result(), placement, work.need.at_once)
            kept = stack.enter_context(WorkFolder(work_folder or default_work_folder(target), run))
            layers, tuning = _write_blocks(work, writer, shown, placement, kept, progress)
        if work.folder.mtp_head is not None:
            write_predictor(work.folder.mtp_head, writer)
        for name, data in work.folder.companions().items():
            writer.add_file(name, data)
        writer.add_file("config.json", _config(work))
        # Opened as any reader would, while it can still be thrown away.
        made = open_model_folder(writer.folder)
        made.checked_manifest()
        card = None if work.report == "none" else _measure(work, made, placement, progress)
        written = (path for path in writer.folder.iterdir() if path.is_file())
        writer.add_file(
            model_card.CARD_FILE,
            model_card.encode(
                recipe=work.recipe,
                calibration=shown,
                source=work.source,
                stored=work.stored,
                adapter=work.folder.adapter,
                size=work.size,
                layers=layers,
                tuning=tuning,
                card=card,
                source_files=origin.result(),
                files=model_card.digests(written),
            ),
        )
        writer.finish()
        if kept is not None:
            kept.clear()
    return Outcome(target, work.size, layers, card, _notes(work, shown, layers, tuning, card))


def default_work_folder(target: Path) -> Path:
    """Where unfinished work for `target` is kept."""
    return target.with_name(f".{target.name}.work")


def _calibration(work: QuantizationPlan) -> Calibration:
    tokenizer = work.folder.tokenizer()
    samples, seq, seed = work.recipe.samples, work.seq, work.recipe.seed
    if work.text is not None:
        return from_file(work.text, tokenizer, samples, seq, seed)
    return bundled(tokenizer, work.config.vocab_size, samples, seq, seed)


def _notes(
    work: QuantizationPlan,
    shown: Calibration | None,
    layers: tuple[Layer, ...],
    tuning: Tuning | None,
    card: Evaluation | None,
) -> tuple[str, ...]:
    notes: list[str] = (
        [] if work.stored is None else [f"made from weights of {work.stored}: what they lost cannot be recovered"]
    )
    if work.folder.mtp_head is not None:
        notes.append("the head that predicts further tokens (mtp.*) is copied as it is")
    if shown is not None and shown.tokens < (widest := max(work.config.hidden_size, work.config.intermediate_size)):
        notes.append(f"calibrated on {shown.tokens} tokens, fewer than the {widest} inputs of a layer: use more")
    for reason, count in sorted(Counter(layer.fallback for layer in layers if layer.fallback).items()):
        named = [layer.name for layer in layers if layer.fallback == reason]
        told = f" ({', '.join(named[:3])}{', ...' if count > 3 else ''})" if reason == UNSEEN else ""
        notes.append(f"{count} of {len(layers)} layers were rounded to nearest: {reason}{told}")
    if tuning is not None:
        notes.append(f"tuning: mean KL of calibration windows held out {tuning.before:.4g} → {tuning.after:.4g}")
    dead = [layer for layer in layers if layer.dead_columns]
    if dead:
        most = max(dead, key=lambda layer: layer.dead_columns)
        some = pluralize(len(dead), "layer")
        notes.append(f"{some} with inputs that calibration never used, at most {most.dead_columns}, in {most.name}")
    if card is not None and card.divergence is not None and card.divergence.kl.value > COLLAPSED_KL:
        notes.append(f"the model has collapsed (mean KL {card.divergence.kl.value:.2g}): it needs more bits")
    return tuple(notes)


def _write_blocks(
    work: QuantizationPlan,
    writer: CheckpointWriter,
    shown: Calibration,
    placement: Placement,
    kept: WorkFolder,
    progress: ReportProgress,
) -> tuple[tuple[Layer, ...], Tuning | None]:
    source, layout = SourceWeights(work.folder), formats.writable(work.packings)
    for name, _ in work.config.tensors():
        if name.removesuffix(".weight") not in work.packings:
            writer.write(name, source.read(name))

    def sink(solved: Solved) -> None:
        for linear, quantized in solved.linears.items():
            write_linear(layout, writer, work, linear, quantized)
        for name, tensor in solved.changed.items():
            writer.write(name, tensor)

    recipe, dtype = work.recipe, torch_dtype(work.config.dtype)
    solver = Solver(recipe.solver, dtype, recipe.scales, recipe.transform, recipe.tune)
    model = StreamedModel(work.folder, placement, work.need.at_once, dense=True)
    if not recipe.tune:
        return tuple(quantize_blocks(model, work.packings, solver, shown.windows, sink, kept, progress)), None
    blocks: list[Solved] = []
    layers = quantize_blocks(model, work.packings, solver, shown.windows, blocks.append, kept, progress)
    tuned = tune_scales(model, blocks, work.packings, dtype, shown.windows, recipe.seed, progress)
    for block in tuned.blocks:
        sink(block)
    return tuple(layers), tuned.kl


def _config(work: QuantizationPlan) -> bytes:
    kept_inside = (linear for spec in work.config.layer_specs for linear in spec.unquantized)
    dense = (work.config.head(), *work.config.per_layer_linears()[1:], *kept_inside)
    kept = [linear.name for linear in dense if linear.name not in work.packings]
    kept += ["re:^mtp[.]"] if work.folder.mtp_head is not None else []
    values = {name: value for name, value in work.folder.raw.values.items() if name != "quantization"}  # of the source
    layout = formats.writable(work.packings)
    values["quantization_config"] = layout.write_quantization(work.packings, kept, work.config.dtype)
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _measure(work: QuantizationPlan, made: ModelFolder, placement: Placement, progress: ReportProgress) -> Evaluation:
    tokenizer = work.folder.tokenizer()
    context = min(REPORT_CONTEXT, work.config.max_context)
    text = cut(held_out_text(), tokenizer, context, QUICK_TOKENS if work.report == "quick" else None)
    trim_heap()
    model, reference = (StreamedModel(each, placement, work.need.at_once) for each in (made, work.folder))
    if "lm_head" not in work.packings:
        model.share_head(reference)
    return evaluate(model, text, reference, progress)
