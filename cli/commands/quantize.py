"""`mycli quantize`: write a smaller copy of a model and report what it lost."""

from pathlib import Path
from typing import Annotated

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.gates import Gates
from mycli.cli.flags.recipe import RecipeFlags
from mycli.cli.load import adapted
from mycli.cli.quantizing.request import QuantizationRequest
from mycli.cli.quantizing.sweep import run_sweep, sweep_recipes
from mycli.cli.quantizing.to_folder import quantize_to_folder
from mycli.cli.quantizing.to_gguf import quantize_to_gguf
from mycli.cli.reports.plot import require_svg
from mycli.quant.ggml.recipe import GgufRecipe
from mycli.quant.planning.settings import PlanSettings, Report
from mycli.runtime.errors import UsageError
from mycli.runtime.hub.resolve import resolve

EXAMPLES = [
    "mycli quantize pico --samples 16",
    "mycli quantize pico --method rtn --bits 8 --group channel -o pico-int8",
    "mycli quantize pico --bits 3 --group 64 --dry-run",
    "mycli quantize pico --bits q4_k_m --samples 16 -o pico-q4_k_m.gguf",
    "mycli quantize pico --sweep bits=8,4 method=rtn --plot sweep.svg",
]


def _check_name(flags: RecipeFlags, output: Path | None) -> None:
    if output is not None and output.suffix.lower() == ".gguf" and flags.format is None and not flags.is_gguf:
        hint = "for a GGUF file: --bits q4_k_m; for a folder of this name: --format folder"
        raise UsageError(f"-o {output}: a folder would be written, not a GGUF file", hint)


@command
def quantize(
    call: Call,
    model: options.Model,
    flags: RecipeFlags,
    gates: Gates,
    adapter: options.AdapterName = None,
    report: Annotated[
        str, options.option("--report", "quick|full|none", "How much held-out text quality is measured on.")
    ] = "quick",
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
    gates.check_values(report)
    if plot is not None:
        require_svg(plot)
    recipe = flags.resolve_gguf() if flags.is_gguf else flags.resolve()
    _check_name(flags, output)
    if flags.is_gguf and sweep:
        raise UsageError("--sweep excludes GGUF", "make one file after the other")
    recipes = sweep_recipes(flags, sweep) if sweep else []
    held_out: Report = options.choice("--report", report, ("quick", "full", "none"))
    source = resolve(model, offline=call.offline)
    request = QuantizationRequest(
        source=source,
        folder=adapted(call, source.open(), model, adapter),
        calib=flags.calib,
        settings=PlanSettings(held_out, max_ram=max_ram, max_vram=max_vram),
        gates=gates,
        device=device,
        output=output,
        work_dir=work_dir,
        plot=plot,
        overwrite=overwrite,
        restart=restart,
        dry_run=dry_run,
    )
    if isinstance(recipe, GgufRecipe):
        quantize_to_gguf(call, request, recipe)
    elif recipes:
        run_sweep(call, request, recipes)
    else:
        quantize_to_folder(call, request, recipe)
