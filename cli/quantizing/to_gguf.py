"""`mycli quantize` into one GGUF file."""

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mycli.cli.command import Call
from mycli.cli.quantizing.request import QuantizationRequest, carry_out_request, quantization_progress, tell_how_to_use
from mycli.cli.reports.quantization import plan_fields, plan_rows
from mycli.quant.ggml.recipe import GgufRecipe
from mycli.quant.planning.target import require_writable_parent
from mycli.runtime.hub.resolve import Source

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.quant.ggml.plan import GgufPlan


def gguf_target(source: Source, recipe: GgufRecipe, output: Path | None) -> Path:
    """Return the file to write: without -o in the current folder, as llama-quantize does."""
    from mycli.quant.ggml.file import gguf_path

    return gguf_path(output or Path(f"{source.label.rsplit('/', 1)[-1]}-{recipe.name}"))


def quantize_to_gguf(call: Call, request: QuantizationRequest, recipe: GgufRecipe) -> None:
    """Plan, carry out and print; a dry run only shows the plan."""
    target = gguf_target(request.source, recipe, request.output)
    if request.work_dir is not None:
        require_writable_parent(request.work_dir)
    from mycli.quant import pipeline
    from mycli.quant.ggml import sensitivity
    from mycli.quant.ggml.pipeline import quantize_gguf
    from mycli.quant.ggml.plan import check_gguf_resources, plan_gguf

    placement = request.place()
    text = request.calibration_file(call, fetch=not request.dry_run or recipe.target_size is not None)
    plan = request.planner(plan_gguf, placement, text)
    work = plan(recipe)
    work_folder = request.work_dir or pipeline.default_work_folder(target)
    check_gguf_resources(work, target, work_folder, overwrite=request.overwrite)
    if recipe.target_size is not None:
        call.out.note("choosing the type of each layer: makes a temporary copy and measures what each layer loses")
        with quantization_progress(call) as progress:
            work = plan(sensitivity.choose_kinds(work, target, placement, progress))
    if request.dry_run:
        _show_plan(call, work, target)
        return
    quantize = partial(quantize_gguf, work, target, placement, work_folder=work_folder)
    carry_out_request(call, request, placement, f"{target.name}: {_steps(work)}", quantize, work_folder)
    name = f"./{target}" if target.parent == Path() else str(target)
    tell_how_to_use(call, request.folder, shlex.quote(name))


def _types(work: "GgufPlan") -> str:
    return ", ".join(f"{count} {kind}" for kind, count in work.kinds.most_common())


def _steps(work: "GgufPlan") -> str:
    windows = f"{work.recipe.samples} windows of {work.seq} tokens"
    return f"{_types(work)}, solved in {work.config.layers} blocks on {windows}"


def _show_plan(call: Call, work: "GgufPlan", target: Path) -> None:
    if call.out.answered({"file": str(target), "types": dict(work.kinds), **plan_fields(work)}):
        return
    rows = [
        ("file", str(target)),
        *plan_rows(work, ("types", _types(work))),
        ("work", _steps(work)),
    ]
    call.out.card(f"{target.name} (dry run, nothing is written)", rows)
