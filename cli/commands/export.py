"""`mycli export`: write a model in the file format of another program, without loss unless --requantize is given."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.load import adapted
from mycli.cli.output import Column
from mycli.cli.text.progress import stages
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.utils.units import human_bytes, pluralize

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.quant.export import Exported

EXAMPLES = (
    "mycli export pico --to gguf -o pico.gguf",
    "mycli export pico --to gguf:q8_0 --requantize -o pico-q8_0.gguf",
    "mycli quantize pico --method rtn --group 32 --report none -o pico-4 && mycli export ./pico-4 --to mlx -o pico-mlx",
)
_FORMATS = "Format. TYPE: f32, f16, bf16, q8_0, q4_0 or q4_k; DTYPE: fp32, fp16 or bf16."
_WORST = 3  # tensors to list


def _loss(answer: dict[str, Any]) -> str:
    rounded = answer["rounded"]
    if not rounded:
        return "none: every weight keeps its value"
    mean = sum(tensor["error"] for tensor in rounded) / len(rounded)
    worst = ", ".join(f"{tensor['name']} ({tensor['kind']}) {tensor['error']:.3g}" for tensor in rounded[:_WORST])
    return f"{pluralize(len(rounded), 'tensor')} rounded, mean relative squared error {mean:.3g}; worst: {worst}"


_COLUMNS = (
    Column("written", lambda answer: f"{answer['path']}, {human_bytes(answer['bytes'])}"),
    Column("tensors", lambda answer: ", ".join(f"{n} {kind}" for kind, n in sorted(answer["tensors"].items()))),
    Column("loss", _loss),
)


@command
def export(
    call: Call,
    model: options.Model,
    to: Annotated[str, options.option("--to", "gguf[:TYPE]|gptq|awq|mlx|safetensors[:DTYPE]", _FORMATS)],
    output: Annotated[Path, options.option("-o --output", "PATH", "File (gguf) or folder to write.")],
    requantize: Annotated[
        bool, options.flag("--requantize", "Round weights that the format cannot hold exactly; report the loss.")
    ] = False,
    adapter: options.AdapterName = None,
    overwrite: Annotated[bool, options.flag("--overwrite", "Replace the output if it exists.")] = False,
) -> None:
    """Write a model in the file format of another program.

    Without --requantize an export that would change a weight is refused with the reason. In GGUF without TYPE, packed
    weights become Q4_0, Q4_1 or Q8_0, whichever is exact, blocks of a GGUF file are copied, and dense weights keep
    their type. For K-quants and IQ types, see quantize --bits q4_k_m.
    """
    from mycli.quant.export import ExportRequest, find_export_target

    module, variant = find_export_target(to)
    source = resolve(model, offline=call.offline)
    folder = adapted(call, source.open(), model, adapter)
    request = ExportRequest(source, folder, output, variant, requantize, overwrite)
    with stages(call.out.progress) as progress:
        exported: Exported = module.export(request, progress)
    for tensor in exported.left_out:
        call.out.note(f"not written, because {to} has no place for it: {tensor}")
    if exported.separate_experts:
        call.out.note(f"transformers does not load the experts of a mixture as {to}; GPTQModel does")
    rounded = sorted(exported.rounded, key=lambda tensor: -tensor.error)
    answer = {
        "path": str(exported.path),
        "to": to,
        "bytes": exported.nbytes,
        "tensors": dict(exported.kinds),
        "left_out": list(exported.left_out),
        "rounded": [{"name": tensor.name, "kind": tensor.kind, "error": tensor.error} for tensor in rounded],
    }
    call.out.show(answer, _COLUMNS, title=to)
