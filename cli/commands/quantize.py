"""mycli quantize: a smaller copy of a model, with a card that says what it cost."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mycli.cli import options
from mycli.cli.command import Call, command
from mycli.cli.format import quality
from mycli.cli.load import announce_placement
from mycli.cli.progress import stages
from mycli.runtime.errors import GateError, UsageError
from mycli.runtime.utils.units import gib

if TYPE_CHECKING:
    from mycli.quant.model_card import Layer
    from mycli.quant.pipeline import Outcome
    from mycli.quant.planning import QuantizationPlan

EXAMPLES = [
    "mycli quantize pico --samples 16",
    "mycli quantize pico --method rtn --bits 8 --group channel -o pico-int8",
    "mycli quantize pico --bits 3 --group 64 --dry-run",
]

WORST = 5

Method = Annotated[
    str,
    typer.Option(
        metavar="gptq|awq|awq+gptq|rtn",
        help="How codes are chosen: awq rescales inputs, gptq makes up for errors; rtn only rounds, and needs no data.",
    ),
]
Bits = Annotated[int, typer.Option(metavar="8|4|3|2", help="Bits per weight, scales apart.")]
TargetBpw = Annotated[
    float | None,
    typer.Option(
        "--target-bpw",
        min=2,
        max=9,
        metavar="X",
        help="Mix widths for so many bits per quantized weight, scales included, by what each layer costs.",
        show_default="--bits for all",
    ),
]
Group = Annotated[str, typer.Option(metavar="32|64|128|channel", help="Inputs that share a scale.")]
Scales = Annotated[
    str, typer.Option(metavar="mse|absmax", help="Signed scales of least error, or the largest weight's.")
]
Head = Annotated[str, typer.Option(metavar="keep|int8|int4", help="What to do with an output head of its own.")]
Calib = Annotated[
    str | None,
    typer.Option(
        "--calib",
        metavar="FILE|hf:DATASET",
        help="Text, .jsonl or .parquet to calibrate on; hf:org/name[@revision][:path] is fetched.",
        show_default="a mixed text in the package",
    ),
]
Samples = Annotated[
    int, typer.Option("--samples", parser=options.parse_count, metavar="N", help="Windows to calibrate on.")
]
Seq = Annotated[
    int | None,
    typer.Option("--seq", parser=options.parse_count, metavar="N", help="Tokens in a window.", show_default="512"),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Draws the windows; the same seed gives the same bytes.")]
Tune = Annotated[
    bool,
    typer.Option("--tune", help="Then train towards the original: each block, then the whole. Ten times as long."),
]
MaxFallback = Annotated[
    float,
    typer.Option("--max-fallback", min=0, max=1, help="End with code 6 where a larger share of layers was rounded."),
]
Report = Annotated[str, typer.Option(metavar="quick|full|none", help="How much held-out text to measure on.")]
MaxKl = Annotated[float | None, typer.Option("--max-kl", help="End with code 6 where the mean KL is above.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say the exact size and the memory needed; write nothing.")]
Out = Annotated[Path | None, typer.Option("-o", "--output", help="Folder to make.", show_default="in $MYCLI_HOME")]
WorkDir = Annotated[
    Path | None,
    typer.Option("--work-dir", help="Keeps finished blocks until the end.", show_default="hidden, beside the output"),
]
MaxRam = Annotated[
    int | None,
    typer.Option("--max-ram", parser=options.parse_memory, metavar="SIZE", help="Take no more memory, such as 4GiB."),
]
MaxVram = Annotated[
    int | None,
    typer.Option("--max-vram", parser=options.parse_memory, metavar="SIZE", help="Take no more of the GPU's memory."),
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the error of each layer.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it exists.")]


def _choice(flag: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UsageError(f"--{flag} {value}: not a choice", f"choose from {', '.join(allowed)}")
    return value


def _calibration_file(call: Call, calib: str, fetch: bool) -> Path | None:
    """Of `--calib`; None for what is not fetched: to a dry run all texts are alike."""
    if not calib.startswith("hf:"):
        return Path(calib)
    from mycli.runtime.hub.client import Hub
    from mycli.runtime.hub.dataset import DatasetName, cached_dataset, fetch_dataset, plan_dataset

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


def _parse_group(text: str) -> int | None:
    if text == "channel":
        return None
    if not text.isdecimal():
        raise UsageError(f"--group {text}: not a group size", "choose from 32, 64, 128, channel")
    return int(text)


def _show_plan(call: Call, work: "QuantizationPlan", target: Path) -> None:
    size = work.size
    if call.out.json_mode:
        call.out.json(
            {
                "folder": str(target),
                "name": work.recipe.name,
                "size": asdict(size),
                "memory_bytes": work.need.host,
                "device_memory_bytes": work.need.device,
                "tokens_at_once": work.need.at_once,
            }
        )
        return
    call.out.card(
        f"{target.name} (nothing is written)",
        [
            ("folder", str(target)),
            ("size", f"{gib(size.bytes)} ({size.bytes} bytes), {size.bits_per_weight:.2f} bits per weight"),
            ("quantized", f"{len(work.packings)} layers at {size.quantized_bits_per_weight:.3f} bits per weight"),
            ("memory", f"{gib(work.need.host)} beyond the program's own"),
            *([("GPU memory", gib(work.need.device))] if work.need.device else []),
        ],
    )


def _show_outcome(call: Call, outcome: "Outcome") -> None:
    size, card = outcome.size, outcome.card
    if call.out.json_mode:
        call.out.json(
            {
                "folder": str(outcome.folder),
                "size": asdict(size),
                "card": None if card is None else asdict(card),
                "layers": [asdict(layer) for layer in outcome.layers],
                "notes": outcome.notes,
            }
        )
        return
    call.out.card(
        outcome.folder.name,
        [
            ("folder", str(outcome.folder)),
            ("size", f"{gib(size.bytes)}, {size.bits_per_weight:.2f} bits per weight"),
            ("quantized", f"{len(outcome.layers)} layers at {size.quantized_bits_per_weight:.3f} bits per weight"),
            *([] if card is None else quality(card)),
            *_gain(outcome),
            ("worst layers", _ranked(outcome)),
        ],
    )


def _breach(outcome: "Outcome", max_kl: float | None, max_fallback: float) -> GateError | None:
    """Why the model is not what was asked for, None where it is."""
    found = None if outcome.card is None else outcome.card.divergence
    if max_kl is not None and found is not None and found.kl.value > max_kl:
        return GateError(
            f"the mean KL of {found.kl.value:.4g} is above --max-kl {max_kl:g}",
            f"more --bits or a smaller --group; the model is kept in {outcome.folder}",
        )
    if outcome.fallbacks > max_fallback * len(outcome.layers):
        return GateError(
            f"{outcome.fallbacks} of {len(outcome.layers)} layers were only rounded, more than --max-fallback"
            f" {max_fallback:g}",
            f"calibrate on more or other text; the model is kept in {outcome.folder}",
        )
    return None


def _ranked(outcome: "Outcome") -> str:
    """The layers that lost most, in words."""

    def error(layer: "Layer") -> float:
        return layer.error if layer.output_error is None else layer.output_error

    worst = sorted(outcome.layers, key=error, reverse=True)[:WORST]
    return ", ".join(f"{layer.name.removeprefix('model.')} {error(layer):.2%}" for layer in worst)


def _gain(outcome: "Outcome") -> list[tuple[str, str]]:
    """How the error of the layers' outputs compares with plain rounding, where it was observed."""
    pairs = [
        (layer.output_error, layer.rounding_output_error)
        for layer in outcome.layers
        if layer.output_error is not None and layer.rounding_output_error is not None
    ]
    if not pairs:
        return []
    ours, rounded = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return [("error of outputs", f"{ours:.3%} on average, {rounded:.3%} if rounded to nearest")]


@command
def quantize(
    call: Call,
    model: options.Model,
    method: Method = "gptq",
    bits: Bits = 4,
    target_bpw: TargetBpw = None,
    group: Group = "128",
    scales: Scales = "mse",
    head: Head = "keep",
    calib: Calib = None,
    samples: Samples = 128,
    seq: Seq = None,
    seed: Seed = 0,
    tune: Tune = False,
    report: Report = "quick",
    max_kl: MaxKl = None,
    max_fallback: MaxFallback = 0.05,
    device: options.Device = "auto",
    output: Out = None,
    work_dir: WorkDir = None,
    plot: Plot = None,
    max_ram: MaxRam = None,
    max_vram: MaxVram = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> None:
    """Make a smaller copy of a model, and measure what it lost.

    The copy is a Hugging Face folder that transformers and vLLM load too. It appears by one rename when all is done;
    its recipe, card and checksums lie in its mycli.json. If the work is interrupted, the same command goes on with it.
    """
    from mycli.quant import pipeline, planning
    from mycli.quant import plot as plotting
    from mycli.quant.model_card import label
    from mycli.quant.recipe import Recipe
    from mycli.runtime.checkpoint.model_folder import ModelFolder
    from mycli.runtime.engine.config import EngineConfig
    from mycli.runtime.hub.resolve import home, resolve
    from mycli.runtime.memory.estimate import MemoryPlan, head_bytes

    if max_kl is not None and report == "none":
        raise UsageError("--max-kl needs a measurement", "drop --report none")
    if plot is not None:
        plotting.require_svg(plot)
    recipe = Recipe(
        method=method,
        bits=bits,
        group=_parse_group(group),
        scales=_choice("scales", scales, ("mse", "absmax")),  # type: ignore[arg-type]  # checked here
        head=_choice("head", head, ("keep", "int8", "int4")),  # type: ignore[arg-type]  # checked here
        samples=samples,
        seq=seq,
        seed=seed,
        target_bpw=target_bpw,
        tune=tune,
    )
    _choice("report", report, ("quick", "full", "none"))
    source = resolve(model, offline=call.offline)
    # Measured in float32: half precision alone moves KL by as much as 8-bit weights do.
    folder = ModelFolder.open(source.folder)
    placement = EngineConfig(device=device, dtype="float32").place(folder.config)
    gpu = placement.device.type == "cuda"
    text = _calibration_file(call, calib, fetch=not dry_run or target_bpw is not None) if calib else None
    plan = partial(
        planning.plan_quantization,
        source,
        folder=folder,
        text=text,
        report=report,  # type: ignore[arg-type]  # checked above
        gpu=gpu,
        max_ram=max_ram,
        max_vram=max_vram,
    )
    work = plan(recipe)
    if recipe.head == "keep" and not folder.config.tie_embeddings:
        kept = gib(head_bytes(MemoryPlan(folder.config)))
        call.out.note(f"the head is kept: {kept} of {gib(work.size.bytes)}; --head int8 halves it")
    target = output or home() / "models" / f"{label(source).rsplit('/', 1)[-1]}-{recipe.name}"
    if target_bpw is not None:
        with stages(call.out.progress) as progress:
            work = plan(pipeline.allocated(work, placement, target, progress))
    if dry_run:
        _show_plan(call, work, target)
        return
    announce_placement(call, placement)
    with stages(call.out.progress) as progress:
        outcome = pipeline.quantize(
            work,
            target,
            placement,
            overwrite=overwrite,
            work_folder=work_dir,
            progress=progress,
        )
    for note in outcome.notes:
        call.out.note(note)
    if plot is not None:
        plotting.write(plot, target.name, [plotting.point(layer) for layer in outcome.layers])
    _show_outcome(call, outcome)
    breach = _breach(outcome, max_kl, max_fallback)
    if breach is not None:
        raise breach
    if output is None and not call.out.json_mode:
        call.out.note(f"talk with it: mycli chat {target.name}")
