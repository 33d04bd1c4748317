"""mycli quantize: a smaller copy of a model, with a card that says what it cost."""

import math
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.recipe import RecipeFlags
from mycli.cli.load import adapted, announce_placement
from mycli.cli.plot import LayerError, layer_error, require_svg, write_errors
from mycli.cli.text.format import quality
from mycli.cli.text.progress import stages
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import GateError, ModelError, UsageError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.dataset import DatasetName, cached_dataset, fetch_dataset, plan_dataset
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.hub.store import data_dir
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.weights import head_bytes
from mycli.runtime.utils.units import human_bytes

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.quant.pipeline import Outcome
    from mycli.quant.planning.plan import QuantizationPlan, Report

EXAMPLES = [
    "mycli quantize pico --samples 16",
    "mycli quantize pico --method rtn --bits 8 --group channel -o pico-int8",
    "mycli quantize pico --bits 3 --group 64 --dry-run",
]

WORST = 5  # layers to name


def _calibration_file(call: Call, calib: str, fetch: bool) -> Path | None:
    """Of `--calib`; None for what is not fetched: to a dry run all texts are alike."""
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
    call.out.note(f"calibrating on {name.repo} @ {job.commit[:12]}: {job.files[0].name}")
    return path


def _about(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def _show_plan(call: Call, work: "QuantizationPlan", target: Path, seconds: float | None) -> None:
    size = work.size
    answer = {
        "folder": str(target),
        "name": work.recipe.name,
        "size": asdict(size),
        "memory_bytes": work.need.host,
        "device_memory_bytes": work.need.device,
        "tokens_at_once": work.need.at_once,
        "seconds": seconds,
    }
    if call.out.answered(answer):
        return
    rows = [
        ("folder", str(target)),
        ("size", f"{human_bytes(size.bytes)} ({size.bytes} bytes), {size.bits_per_weight:.2f} bits per weight"),
        ("quantized", f"{len(work.packings)} layers at {size.quantized_bits_per_weight:.3f} bits per weight"),
        ("memory", f"{human_bytes(work.need.host)} beyond the program's own"),
        *([("GPU memory", human_bytes(work.need.device))] if work.need.device else []),
        *(
            []
            if seconds is None
            else [("time", f"about {_about(seconds)}, judging by a second of such work on this machine")]
        ),
    ]
    call.out.card(f"{target.name} (nothing is written)", rows)


def _gain(points: Sequence[LayerError]) -> list[tuple[str, str]]:
    """How the error of the layers' outputs compares with plain rounding, where it was observed."""
    pairs = [(one.error, one.rounding) for one in points if one.rounding is not None]
    if not pairs:
        return []
    ours, rounded = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return [("error of outputs", f"{ours:.3%} on average, {rounded:.3%} if rounded to nearest")]


def _show_outcome(call: Call, outcome: "Outcome", points: Sequence[LayerError]) -> None:
    size, card = outcome.size, outcome.card
    worst = sorted(points, key=lambda one: one.error, reverse=True)[:WORST]
    answer = {
        "folder": str(outcome.folder),
        "size": asdict(size),
        "card": None if card is None else asdict(card),
        "layers": [asdict(layer) for layer in outcome.layers],
        "notes": outcome.notes,
    }
    if call.out.answered(answer):
        return
    rows = [
        ("folder", str(outcome.folder)),
        ("size", f"{human_bytes(size.bytes)}, {size.bits_per_weight:.2f} bits per weight"),
        ("quantized", f"{len(outcome.layers)} layers at {size.quantized_bits_per_weight:.3f} bits per weight"),
        *([] if card is None else quality(card)),
        *_gain(points),
        ("worst layers", ", ".join(f"{one.name.removeprefix('model.')} {one.error:.2%}" for one in worst)),
    ]
    call.out.card(outcome.folder.name, rows)


def _check(outcome: "Outcome", max_kl: float | None, max_fallback: float) -> None:
    """Raises GateError for a model that is not what was asked for."""
    found = None if outcome.card is None else outcome.card.divergence
    if max_kl is not None and found is not None and found.kl.value > max_kl:
        raise GateError(
            f"the mean KL of {found.kl.value:.4g} is above --max-kl {max_kl:g}",
            f"more --bits or a smaller --group; the model is kept in {outcome.folder}",
        )
    if outcome.fallbacks > max_fallback * len(outcome.layers):
        raise GateError(
            f"{outcome.fallbacks} of {len(outcome.layers)} layers were only rounded, more than --max-fallback"
            f" {max_fallback:g}",
            f"calibrate on more or other text; the model is kept in {outcome.folder}",
        )


def _target(work: "QuantizationPlan") -> Path:
    """The folder that is made where none is named: after the model, the adapter that is in it, and the recipe."""
    adapter = work.folder.adapter
    names = [work.source.label, *([] if adapter is None else [adapter.name])]
    return data_dir() / "models" / "-".join([*(name.rsplit("/", 1)[-1] for name in names), work.recipe.name])


def _how_to_go_on(work: "QuantizationPlan", kept: Path) -> str:
    """For whoever stopped it."""
    again = shlex.join(["mycli", *sys.argv[1:]])
    if not (work.recipe.needs_data and kept.is_dir()):
        return f"stopped; nothing was written; to start again: {again}"
    return f"stopped; finished blocks are kept in {kept}; to continue: {again}"


def _how_to_use(folder: ModelFolder, name: str) -> str:
    """For whoever made `name`, quoted, of the model in `folder`."""
    with suppress(ModelError):  # a template that cannot be read is none to chat with
        if folder.chat_template() is not None:
            return f"chat with it: mycli chat {name}"
    return f"continue a text with it: mycli run {name} PROMPT"


@command
def quantize(
    call: Call,
    model: options.Model,
    made: RecipeFlags,
    adapter: options.AdapterName = None,
    report: Annotated[
        str, typer.Option(metavar="quick|full|none", help="How much held-out text to measure on.")
    ] = "quick",
    max_kl: Annotated[
        float | None, typer.Option("--max-kl", metavar="X", help="Exit with 6 if the mean KL is above this.")
    ] = None,
    max_fallback: Annotated[
        float,
        typer.Option(
            "--max-fallback",
            metavar="SHARE",
            min=0,
            max=1,
            help="Exit with 6 if a larger share of layers was only rounded.",
        ),
    ] = 0.05,
    device: options.Device = "auto",
    threads: options.Threads = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="PATH", help="Folder to make.", show_default="in $MYCLI_HOME"),
    ] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(
            "--work-dir",
            metavar="FOLDER",
            help="Where finished blocks are kept until the end.",
            show_default="hidden, beside the output",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the error of each layer.")
    ] = None,
    max_ram: Annotated[
        int | None, options.size_option("--max-ram", help="Use no more memory than this, such as 4GiB.")
    ] = None,
    max_vram: Annotated[
        int | None, options.size_option("--max-vram", help="Use no more of the GPU's memory than this.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it exists.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say the exact size, the memory and about the time needed; write nothing.")
    ] = False,
) -> None:
    """Make a smaller copy of a model, and measure what it lost.

    The copy is a Hugging Face folder that transformers and vLLM load too. It appears by one rename when all is done;
    its recipe, card and checksums lie in its mycli.json. If the work is interrupted, the same command continues it.
    """
    from mycli.quant import pipeline
    from mycli.quant.planning import plan as planning

    if max_kl is not None and report == "none":
        raise UsageError("--max-kl needs a measurement", "omit --report none")
    if max_kl is not None and not 0 < max_kl < math.inf:
        raise UsageError(f"--max-kl {max_kl}: must be above 0", "such as 0.05")
    if plot is not None:
        require_svg(plot)
    recipe = made.resolve()
    held_out: Report = options.choice("--report", report, ("quick", "full", "none"))
    source = resolve(model, offline=call.offline)
    # Measured in float32: half precision alone moves KL by as much as 8-bit weights do.
    folder = adapted(call, open_model_folder(source.folder), model, adapter)
    placement = EngineConfig(device=device, dtype="float32").place(folder.config)
    text = _calibration_file(call, made.calib, not dry_run or recipe.target_bpw is not None) if made.calib else None
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
    work = plan(recipe)
    if recipe.head == "keep" and not folder.config.tie_embeddings:
        kept = human_bytes(head_bytes(MemoryPlan(folder.config)))
        call.out.note(f"the head is kept: {kept} of {human_bytes(work.size.bytes)}; --head int8 halves it")
    target = output or _target(work)
    planning.check_resources(work, target, overwrite=overwrite)
    if recipe.target_bpw is not None:
        with stages(call.out.progress) as progress:
            work = plan(pipeline.allocated(work, placement, target, progress))
    if dry_run:
        from mycli.quant.planning.pace import expected_seconds

        _show_plan(call, work, target, expected_seconds(work, placement))
        return
    announce_placement(call, placement)
    try:
        with stages(call.out.progress) as progress:
            outcome = pipeline.quantize(
                work, target, placement, overwrite=overwrite, work_folder=work_dir, progress=progress
            )
    except KeyboardInterrupt:
        call.out.note(_how_to_go_on(work, work_dir or pipeline.default_work_folder(target)))
        raise
    for note in outcome.notes:
        call.out.note(note)
    points = [layer_error(layer) for layer in outcome.layers]
    if plot is not None:
        write_errors(plot, target.name, points)
    _show_outcome(call, outcome, points)
    _check(outcome, max_kl, max_fallback)
    if output is None and not call.out.json_mode:
        call.out.note(_how_to_use(folder, shlex.quote(target.name)))
