"""`mycli export`: a model in another program's layout, without loss where that layout allows it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.load import adapted
from mycli.cli.text.progress import stages
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.utils.units import human_bytes, pluralize

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.quant.export import Exported

EXAMPLES = (
    "mycli export pico --to gguf -o pico.gguf",
    "mycli export pico --to gguf:q8_0 --requantize -o pico-q8_0.gguf",
    "mycli quantize pico --method rtn --group 32 --report none -o pico-4 && mycli export ./pico-4 --to mlx -o pico-mlx",
)
_WORST = 3  # tensors to name


@command
def export(
    call: Call,
    model: options.Model,
    to: Annotated[
        str,
        typer.Option("--to", metavar="gguf[:TYPE]|gptq|awq|mlx|safetensors", help="The layout; TYPE is f16, q8_0, …"),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PATH", help="File (gguf) or folder to make.")],
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Round what the layout cannot hold exactly, and say what was lost.")
    ] = False,
    adapter: options.AdapterName = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
) -> None:
    """Write a model in another program's layout.

    Every weight keeps its value, or the export is refused and says why; --requantize rounds instead. Without a TYPE
    each tensor of a GGUF file keeps the most: packed weights become Q4_0, Q4_1 or Q8_0, dense ones stay as they are.
    """
    from mycli.quant.export import ExportRequest, find_export_target

    module, variant = find_export_target(to)
    source = resolve(model, offline=call.offline)
    folder = adapted(call, open_model_folder(source.folder), model, adapter)
    request = ExportRequest(source, folder, output, variant, requantize, overwrite)
    with stages(call.out.progress) as progress:
        done = module.export(request, progress)
    _show(call, to, done)


def _show(call: Call, to: str, done: "Exported") -> None:
    for part in done.left_out:
        call.out.note(f"left out, having no place in {to}: {part}")
    worst = sorted(done.rounded, key=lambda one: -one.error)
    answer = {
        "path": str(done.path),
        "to": to,
        "bytes": done.nbytes,
        "tensors": dict(done.kinds),
        "left_out": list(done.left_out),
        "rounded": [{"name": one.name, "kind": one.kind, "error": one.error} for one in worst],
    }
    if call.out.answered(answer):
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(done.kinds.items()))
    rows = [("written", f"{done.path}, {human_bytes(done.nbytes)}"), ("tensors", kinds)]
    if not worst:
        rows.append(("loss", "none: every weight keeps its value"))
    else:
        mean = sum(one.error for one in worst) / len(worst)
        rows.append(("rounded", f"{pluralize(len(worst), 'tensor')}, relative squared error {mean:.3g} on average"))
        rows += [("worst", f"{one.name} ({one.kind}) {one.error:.3g}") for one in worst[:_WORST]]
    call.out.card(f"{to}", rows)
