"""The part of `mycli quantize` that writes one GGUF file."""

import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mycli.cli.command import Call
from mycli.cli.load import announce_build, announce_placement
from mycli.quant.ggml.recipe import GgufRecipe
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.hub.resolve import Source
from mycli.runtime.utils.units import human_bytes

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.quant.ggml.plan import GgufPlan
    from mycli.quant.pipeline import Outcome
    from mycli.quant.planning.plan import Report
    from mycli.quant.progress import ReportProgress
    from mycli.runtime.device.placement import Placement


@dataclass(frozen=True)
class GgufRun:
    """The arguments of a quantization to GGUF besides its recipe."""

    source: Source
    folder: ModelFolder
    target: Path
    placement: "Placement"
    text: Path | None
    report: "Report"
    work_folder: Path | None
    max_ram: int | None
    max_vram: int | None
    overwrite: bool
    restart: bool
    dry_run: bool


def gguf_target(source: Source, recipe: GgufRecipe, output: Path | None) -> Path:
    """Return the file to write: without -o in the current folder, as llama-quantize does."""
    from mycli.quant.ggml.file import gguf_path

    return gguf_path(output or Path(f"{source.label.rsplit('/', 1)[-1]}-{recipe.name}"))


def quantize_to_gguf(
    call: Call, run: GgufRun, recipe: GgufRecipe, progress: "Callable[[], AbstractContextManager[ReportProgress]]"
) -> "Outcome | None":
    """Plan and carry out; returns None for a dry run, which only shows the plan."""
    from mycli.quant import pipeline
    from mycli.quant.ggml import sensitivity
    from mycli.quant.ggml.pipeline import quantize_gguf
    from mycli.quant.ggml.plan import check_gguf_resources, plan_gguf

    def plan(chosen: GgufRecipe) -> "GgufPlan":
        return plan_gguf(
            run.source,
            chosen,
            run.text,
            folder=run.folder,
            report=run.report,
            gpu=run.placement.device.type == "cuda",
            max_ram=run.max_ram,
            max_vram=run.max_vram,
        )

    work = plan(recipe)
    work_folder = run.work_folder or pipeline.default_work_folder(run.target)
    check_gguf_resources(work, run.target, work_folder, overwrite=run.overwrite)
    if recipe.target_size is not None:
        call.out.note("choosing the type of each layer: makes a temporary copy and measures what each layer loses")
        with progress() as report:
            work = plan(sensitivity.choose_kinds(work, run.target, run.placement, report))
    if run.dry_run:
        _show_plan(call, work, run.target)
        return None
    announce_placement(call, run.placement)
    announce_build(call, run.placement)
    call.out.note(f"{run.source.label} → {run.target.name}: {_steps(work)}")
    try:
        with progress() as report:
            return quantize_gguf(
                work,
                run.target,
                run.placement,
                overwrite=run.overwrite,
                work_folder=work_folder,
                restart=run.restart,
                progress=report,
                note=call.out.note,
            )
    except KeyboardInterrupt:
        again = shlex.join(["mycli", *sys.argv[1:]])
        call.out.note(f"stopped; finished blocks are stored in {work_folder}; to continue: {again}")
        raise


def _types(work: "GgufPlan") -> str:
    return ", ".join(f"{count} {kind}" for kind, count in work.kinds.most_common())


def _steps(work: "GgufPlan") -> str:
    windows = f"{work.recipe.samples} windows of {work.seq} tokens"
    return f"{_types(work)}, solved in {work.config.layers} blocks on {windows}"


def _show_plan(call: Call, work: "GgufPlan", target: Path) -> None:
    answer = {
        "file": str(target),
        "name": work.recipe.name,
        "size": asdict(work.size),
        "types": dict(work.kinds),
        "memory_bytes": work.need.host,
        "device_memory_bytes": work.need.device,
        "tokens_at_once": work.need.at_once,
    }
    if call.out.answered(answer):
        return
    size = work.size
    rows = [
        ("file", str(target)),
        ("size", f"{human_bytes(size.bytes)} ({size.bytes} bytes), {size.bits_per_weight:.2f} bits per weight"),
        ("types", _types(work)),
        ("memory", f"{human_bytes(work.need.host)} in addition to Python and torch"),
        ("work", _steps(work)),
    ]
    call.out.card(f"{target.name} (dry run, nothing is written)", rows)
