"""`mycli quantize`: write a smaller copy of a model and report what it lost."""

import math
import shlex
import sys
import time
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.recipe import RecipeFlags
from mycli.cli.gguf_file import GgufRun, gguf_target, quantize_to_gguf
from mycli.cli.load import adapted, announce_build, announce_placement
from mycli.cli.reports.plot import layer_error, require_svg, write_errors
from mycli.cli.reports.quantization import Gates, show_outcome, show_plan, steps
from mycli.cli.reports.sweep import Copy, Options, run_sweep, sweep_recipes
from mycli.cli.text.progress import STEP_SECONDS, duration, stages
from mycli.quant.planning.target import check_target, require_writable_parent
from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.dataset import DatasetName, cached_dataset, fetch_dataset, plan_dataset
from mycli.runtime.hub.resolve import Source, resolve
from mycli.runtime.hub.store import data_dir
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.weights import head_bytes
from mycli.runtime.utils.units import human_bytes

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.quant.pipeline import Outcome
    from mycli.quant.planning.plan import QuantizationPlan, Report
    from mycli.quant.progress import ReportProgress
    from mycli.runtime.device.placement import Placement

EXAMPLES = [
    "mycli quantize pico --samples 16",
    "mycli quantize pico --method rtn --bits 8 --group channel -o pico-int8",
    "mycli quantize pico --bits 3 --group 64 --dry-run",
    "mycli quantize pico --bits q4_k_m --samples 16 -o pico-q4_k_m.gguf",
    "mycli quantize pico --sweep bits=8,4 method=rtn --plot sweep.svg",
]


def calibration_file(call: Call, calib: str, fetch: bool) -> Path | None:
    # None for a data set that is not downloaded: a dry run gives the same result with every text.
    if not calib.startswith("hf:"):
        return Path(calib)
    name = DatasetName.parse(calib.removeprefix("hf:"))
    if call.offline:
        return cached_dataset(name)
    if not fetch:
        return None
    with Hub.connect(call.out.note) as hub:
        job = plan_dataset(hub, name)
        with call.out.progress(f"{name.repo} @ {job.commit[:12]}", job.new_bytes, "B") as bar:
            path = fetch_dataset(hub, job, bar.advance)
    call.out.note(f"calibration data: {name.repo} @ {job.commit[:12]}, {job.files[0].name}")
    return path


def target_folder(source: Source, recipe: Recipe, folder: ModelFolder) -> Path:
    names = [source.label, *([] if folder.adapter is None else [folder.adapter.name])]
    return data_dir() / "models" / "-".join([*(name.rsplit("/", 1)[-1] for name in names), recipe.name])


def _with_widths(call: Call, work: "QuantizationPlan", placement: "Placement", target: Path) -> Recipe:
    from mycli.quant import pipeline
    from mycli.quant.planning.mixed_precision import low_width
    from mycli.quant.planning.pace import choosing_seconds

    mean = work.recipe.target_bpw
    assert mean is not None
    call.out.note(
        f"choosing the bits of each layer for a mean of {mean:g}: makes a temporary copy of"
        f" {low_width(mean, work.recipe.group)} bits and measures what each layer loses,"
        f" about {duration(choosing_seconds(work, placement))}"
    )
    with quantization_progress(call) as progress:
        return pipeline.choose_widths(work, placement, target, progress)


def quantization_progress(call: Call) -> "AbstractContextManager[ReportProgress]":
    return stages(partial(call.out.progress, line_seconds=STEP_SECONDS))


def _how_to_continue(work: "QuantizationPlan", work_folder: Path) -> str:
    again = shlex.join(["mycli", *sys.argv[1:]])
    if not (work.recipe.needs_data and work_folder.is_dir()):
        return f"stopped; nothing was written; to start again: {again}"
    return f"stopped; finished blocks are stored in {work_folder}; to continue: {again}"


def _finish(call: Call, outcome: "Outcome", plot: Path | None, gates: Gates) -> None:
    for note in outcome.notes:
        call.out.note(note)
    errors = [layer_error(layer) for layer in outcome.layers]
    if plot is not None:
        write_errors(plot, outcome.folder.name, errors)
    show_outcome(call, outcome, errors)
    gates.check(outcome)


def how_to_use(folder: ModelFolder, name: str) -> str:
    with suppress(ModelError):  # without a readable template there is no chat
        if folder.chat_template() is not None:
            return f"to chat with it: mycli chat {name}"
    return f"to continue a text with it: mycli run {name} PROMPT"


@command
def quantize(
    call: Call,
    model: options.Model,
    flags: RecipeFlags,
    adapter: options.AdapterName = None,
    report: Annotated[
        str, options.option("--report", "quick|full|none", "How much held-out text quality is measured on.")
    ] = "quick",
    max_kl: Annotated[
        float | None, options.option("--max-kl", "X", "Exit with 6 if the mean KL is above this.")
    ] = None,
    max_call_loss: Annotated[
        float | None,
        options.option(
            "--max-call-loss",
            "SHARE",
            "Exit with 6 if valid tool calls get lost in a larger share of the built-in prompts.",
            min=0,
            max=1,
        ),
    ] = None,
    max_fallback: Annotated[
        float,
        options.option(
            "--max-fallback", "SHARE", "Exit with 6 if a larger share of layers could only be rounded.", min=0, max=1
        ),
    ] = 0.05,
    device: options.Device = "auto",
    threads: options.Threads = None,
    output: Annotated[
        Path | None,
        options.option(
            "-o --output", "PATH", "Folder or .gguf file to write.", show_default="in $MYCLI_HOME; a file: here"
        ),
    ] = None,
    work_dir: Annotated[
        Path | None,
        options.option(
            "--work-dir",
            "FOLDER",
            "Folder for finished blocks until the end.",
            show_default="hidden, next to the output",
        ),
    ] = None,
    plot: Annotated[
        Path | None, options.option("--plot", "FILE.svg", "Draw the error of each layer; with --sweep, of each copy.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        options.option(
            "--sweep",
            "bits=4,3 method=rtn,gptq",
            "Make a copy for each combination of bits, method and group, and compare them; repeatable.",
        ),
    ] = None,
    max_ram: Annotated[int | None, options.size("--max-ram", "Limit of memory, such as 4GiB.")] = None,
    max_vram: Annotated[int | None, options.size("--max-vram", "Limit of GPU memory.")] = None,
    overwrite: Annotated[bool, options.flag("--overwrite", "Replace the folder if it exists.")] = False,
    restart: Annotated[
        bool, options.flag("--restart", "Drop the finished blocks of an interrupted run and begin again.")
    ] = False,
    dry_run: Annotated[
        bool,
        options.flag(
            "--dry-run",
            "Print what would be done, the exact size, memory and an estimate of the time; write no model.",
        ),
    ] = False,
) -> None:
    """Make a smaller copy of a model and measure its quality.

    The copy is a Hugging Face folder that transformers and vLLM load too, or with --format gguf a file that llama.cpp
    loads; its mycli.json holds recipe, quality and checksums. It appears when all is done. After an interruption the
    same command continues the work.
    """
    if (max_kl is not None or max_call_loss is not None) and report == "none":
        option = "--max-call-loss" if max_kl is None else "--max-kl"
        raise UsageError(f"{option} needs a quality measurement", "omit --report none")
    if max_kl is not None and not 0 < max_kl < math.inf:
        raise UsageError(f"--max-kl {max_kl} must be above 0", "for example: --max-kl 0.05")
    if plot is not None:
        require_svg(plot)
    gates = Gates(max_kl, max_call_loss, max_fallback)
    gguf = flags.resolve_gguf() if flags.is_gguf else None
    recipe = Recipe() if gguf is not None else flags.resolve()
    held_out: Report = options.choice("--report", report, ("quick", "full", "none"))
    source = resolve(model, offline=call.offline)
    # Measured in float32: half precision alone moves KL by as much as 8-bit weights do.
    folder = adapted(call, open_model_folder(source.folder), model, adapter)
    if sweep:
        recipes = sweep_recipes(flags, sweep)
        gated = max_kl is not None or max_call_loss is not None
        if gated or recipe.target_bpw is not None or work_dir is not None or held_out == "none":
            excluded = "--max-kl, --max-call-loss, --target-bpw, --work-dir and --report none"
            raise UsageError(f"--sweep excludes {excluded}", "omit them")
    target = output or target_folder(source, recipe, folder)
    if gguf is not None:
        target = gguf_target(source, gguf, output)
        if sweep:
            raise UsageError("--sweep excludes GGUF", "make one file after the other")
    elif not sweep:
        check_target(target, overwrite, source.folder)
    if work_dir is not None:
        require_writable_parent(work_dir)
    from mycli.quant import pipeline
    from mycli.quant.planning import plan as planning

    placement = EngineConfig(device=device, dtype="float32").place(folder.config)
    text = calibration_file(call, flags.calib, not dry_run or recipe.target_bpw is not None) if flags.calib else None
    plan = partial(
        planning.plan_quantization,
        source,
        folder=folder,
        text=text,
        report=held_out,
        gpu=placement.device.type == "cuda",
        max_ram=max_ram,
        max_vram=max_vram,
    )
    if gguf is not None:
        run = GgufRun(
            source,
            folder,
            target,
            placement,
            text,
            held_out,
            work_dir,
            max_ram,
            max_vram,
            overwrite=overwrite,
            restart=restart,
            dry_run=dry_run,
        )
        outcome_of_file = quantize_to_gguf(call, run, gguf, partial(quantization_progress, call))
        if outcome_of_file is not None:
            _finish(call, outcome_of_file, plot, gates)
            if not call.out.json_mode:
                name = f"./{target}" if target.parent == Path() else str(target)
                call.out.note(how_to_use(folder, shlex.quote(name)))
        return
    if sweep:
        copies = [
            Copy(
                copy_recipe,
                target_folder(source, copy_recipe, folder) if output is None else output / copy_recipe.name,
            )
            for copy_recipe in recipes
        ]
        run_sweep(
            call, copies, plan, placement, Options(overwrite=overwrite, restart=restart, plot=plot, dry_run=dry_run)
        )
        return
    work, choosing = plan(recipe), 0.0
    if folder.config.head().name not in work.packings and not folder.config.tie_embeddings:
        head = human_bytes(head_bytes(MemoryPlan(folder.config)))
        call.out.note(
            f"the output head stays unquantized: {head} of {human_bytes(work.size.bytes)}; --head int8 halves it"
        )
    work_folder = work_dir or pipeline.default_work_folder(target)
    planning.check_resources(work, target, overwrite=overwrite, work_folder=work_folder)
    if recipe.target_bpw is not None:
        began = time.monotonic()
        work = plan(_with_widths(call, work, placement, target))
        choosing = time.monotonic() - began
    if dry_run:
        from mycli.quant.planning.pace import expected_seconds

        show_plan(call, work, target, choosing + expected_seconds(work, placement))
        return
    announce_placement(call, placement)
    announce_build(call, placement)
    call.out.note(f"{source.label} → {target.name}: {'; '.join(steps(work))}")
    try:
        with quantization_progress(call) as progress:
            outcome = pipeline.quantize(
                work,
                target,
                placement,
                overwrite=overwrite,
                work_folder=work_folder,
                restart=restart,
                progress=progress,
                note=call.out.note,
            )
    except KeyboardInterrupt:
        call.out.note(_how_to_continue(work, work_folder))
        raise
    _finish(call, outcome, plot, gates)
    if output is None and not call.out.json_mode:
        call.out.note(how_to_use(folder, shlex.quote(target.name)))
