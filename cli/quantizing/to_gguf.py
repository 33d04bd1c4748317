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
    target = request.target(gguf_target(request.source, recipe, request.output))
    path = target.path
    if request.work_dir is not None:
        require_writable_parent(request.work_dir)
    from mycli.quant.ggml import sensitivity
    from mycli.quant.ggml.pipeline import quantize_gguf
    from mycli.quant.ggml.plan import check_gguf_resources, plan_gguf

    placement = request.place()
    settings = request.plan_settings(call, placement, fetch=not request.dry_run or recipe.target_size is not None)
    work = plan_gguf(request.source, recipe, settings, request.folder)
    check_gguf_resources(work, target)
    if recipe.target_size is not None:
        call.out.note("choosing the type of each layer: makes a temporary copy and measures what each layer loses")
        with quantization_progress(call) as progress:
            recipe = sensitivity.choose_kinds(work, path, placement, progress)
        work = plan_gguf(request.source, recipe, settings, request.folder)
    if request.dry_run:
        _show_plan(call, work, path)
        return
    quantize = partial(quantize_gguf, work, target, placement)
    carry_out_request(call, request, placement, f"{path.name}: {_steps(work)}", quantize, target.work_folder)
    name = f"./{path}" if path.parent == Path() else str(path)
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
