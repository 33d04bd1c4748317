"""`mycli quantize` into a folder of safetensors."""

import shlex
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mycli.cli.command import Call
from mycli.cli.quantizing.request import QuantizationRequest, carry_out_request, quantization_progress, tell_how_to_use
from mycli.cli.reports.quantization import show_plan, steps
from mycli.cli.text.progress import duration
from mycli.quant.planning.target import check_target, require_writable_parent
from mycli.quant.recipe import Recipe
from mycli.runtime.hub.store import data_dir
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.weights import head_bytes
from mycli.runtime.utils.units import human_bytes

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.quant.planning.plan import QuantizationPlan
    from mycli.runtime.device.placement import Placement


def target_folder(request: QuantizationRequest, recipe: Recipe) -> Path:
    """Return the folder that a recipe's copy gets without -o."""
    adapter = request.folder.adapter
    names = [request.source.label, *([] if adapter is None else [adapter.name])]
    return data_dir() / "models" / "-".join([*(name.rsplit("/", 1)[-1] for name in names), recipe.name])


def quantize_to_folder(call: Call, request: QuantizationRequest, recipe: Recipe) -> None:
    """Plan, carry out and print; a dry run only shows the plan."""
    target = request.target(request.output or target_folder(request, recipe))
    check_target(target.path, target.overwrite, request.source.folder)
    if request.work_dir is not None:
        require_writable_parent(request.work_dir)
    from mycli.quant import pipeline
    from mycli.quant.planning.pace import expected_seconds
    from mycli.quant.planning.plan import check_resources, plan_quantization

    placement = request.place()
    settings = request.plan_settings(call, placement, fetch=not request.dry_run or recipe.target_bpw is not None)
    work, choosing = plan_quantization(request.source, recipe, settings, request.folder), 0.0
    _note_unquantized_head(call, work)
    check_resources(work, target, target.work_folder)
    if recipe.target_bpw is not None:
        began = time.monotonic()
        recipe = _with_widths(call, work, placement, target.path)
        work = plan_quantization(request.source, recipe, settings, request.folder)
        choosing = time.monotonic() - began
    if request.dry_run:
        show_plan(call, work, target.path, choosing + expected_seconds(work, placement))
        return

    quantize = partial(pipeline.quantize, work, target, placement)
    stored_in = target.work_folder if work.recipe.needs_data else None
    carry_out_request(call, request, placement, f"{target.path.name}: {'; '.join(steps(work))}", quantize, stored_in)
    if request.output is None:
        tell_how_to_use(call, request.folder, shlex.quote(target.path.name))


def _note_unquantized_head(call: Call, work: "QuantizationPlan") -> None:
    config = work.config
    if config.head().name not in work.packings and not config.tie_embeddings:
        head = human_bytes(head_bytes(MemoryPlan(config)))
        smaller = "" if work.recipe.solver_spec.stands_alone else "; --head int8 halves it"
        call.out.note(f"the output head stays unquantized: {head} of {human_bytes(work.size.bytes)}{smaller}")


def _with_widths(call: Call, work: "QuantizationPlan", placement: "Placement", target: Path) -> Recipe:
    from mycli.quant import pipeline
    from mycli.quant.planning.pace import choosing_seconds
    from mycli.quant.planning.plan import plan_low_copy

    mean = work.recipe.target_bpw
    assert mean is not None
    call.out.note(
        f"choosing the bits of each layer for a mean of {mean:g}: makes a temporary copy of"
        f" {plan_low_copy(work).recipe.bits} bits and measures what each layer loses,"
        f" about {duration(choosing_seconds(work, placement))}"
    )
    with quantization_progress(call) as progress:
        return pipeline.choose_widths(work, placement, target, progress)
