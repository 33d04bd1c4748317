"""Verifies every format that is written with the readers of other programs, and plants faults that each must find.

    python -m tests.benchmarks.verify_exports --llama-cpp FOLDER --gptqmodel ENV/bin/python [--parts PART ...]
        [--only WORD]

FOLDER holds llama-quantize and llama-server; ENV has transformers, gptqmodel and bitsandbytes. Models are pico, and a
random mixture with the vocabulary of pico. Prints one line for each format and reader, and for each planted fault; with
`--only` the lines of formats whose name contains WORD.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mycli.quant import readers
from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.ggml.mixes import MIXES
from mycli.quant.progress import silent
from mycli.quant.recipe import Recipe
from mycli.quant.verification import tokens_to_score, verify_reading
from mycli.runtime.checkpoint.gguf.files import GgufFiles
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import UserError
from mycli.runtime.hub.resolve import Source
from tests.support.gguf_exports import make_exported
from tests.support.models import CPU
from tests.support.paths import PICO
from tests.support.quantizing import make

EXACT = replace(CPU, dtype=torch.float32)
# Kind and width of a copy of pico -> the formats that it is exported to.
COPIES: dict[tuple[str, int, int | None], tuple[str, ...]] = {
    ("rtn", 8, 32): ("gptq", "gguf", "mlx"),
    ("rtn", 4, 32): ("gptq", "awq", "gguf", "mlx", "safetensors", "safetensors:bf16", "safetensors:fp32"),
    ("rtn", 3, 32): ("gptq", "gguf"),
    ("rtn", 2, 32): ("gptq", "gguf"),
    ("rtn", 4, 128): ("gptq", "awq"),
    ("nf4", 4, 64): ("safetensors:fp32",),
}
VARIANTS = (
    *("gguf", "gguf:f32", "gguf:f16", "gguf:bf16", "gguf:q8_0", "gguf:q4_0", "gguf:q4_k"),
    *("safetensors", "safetensors:fp16", "safetensors:fp32"),
)


def verified(model: Path, reader: str, program: Path | None, reference: Path | None = None) -> str:
    opened, module = open_model_folder(model), readers.load(reader)
    expected = opened if reference is None else open_model_folder(reference)
    tokens = tokens_to_score(opened.config.vocab_size)
    try:
        reading = module.read(readers.Task(model, tokens, program))
    except UserError as error:
        return f"not read: {error.message}"
    result = verify_reading(reading, module.WEIGHT_NAMES, expected, opened, tokens, EXACT)
    if result.faults:
        return f"{result.program}: {len(result.faults)} differ: {result.faults[0].weight} {result.faults[0].problem}"
    logits = "no logits" if result.logits is None else f"logits within {result.logits:.1g} nats"
    if result.rounded is not None:
        logits += f", with activations rounded {result.rounded:.1g}"
    return f"{result.program}: {result.weights} weights equal, {logits}{', TOO FAR' if result.logits_fail else ''}"


def export(folder: Path, to: str, target: Path) -> Path:
    """Export a model, rounding where the format needs it."""
    module, variant = find_export_target(to)
    return module.export(
        ExportRequest(Source("m", folder), open_model_folder(folder), target, variant, True), silent
    ).path


def packed(folder: Path, recipe: Recipe, target: Path) -> Path:
    return make(Source("m", folder), target, recipe).folder


def formats(work: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    for (method, bits, group), targets in COPIES.items():
        name = f"{method} int{bits}-g{group}" if method != "nf4" else "nf4"
        recipe, copy = Recipe(method=method, bits=bits, group=group), work / name.replace(" ", "-")
        make = cache(partial(packed, PICO, recipe, copy))
        yield f"quantize, {name}", make
        for to in targets:
            yield f"export, {name} to {to}", partial(_exported, make, to, work)
    for to in VARIANTS:
        yield f"export, pico to {to}", partial(export, PICO, to, work / f"pico-{to.replace(':', '-')}")


def _exported(make: Callable[[], Path], to: str, work: Path) -> Path:
    copy = make()
    return export(copy, to, work / f"{copy.name}-{to.replace(':', '-')}")


def mixtures(work: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    def make() -> Path:
        make_exported(work / "random", "qwen3_moe-8top2")
        return packed(work / "random", Recipe(method="rtn", bits=4, group=32), work / "mixture-int4")

    copy = cache(make)
    yield "quantize, mixture int4-g32", copy
    for to in ("gptq", "awq", "gguf"):
        yield f"export, mixture int4-g32 to {to}", partial(_exported, copy, to, work)


def mixes(work: Path) -> Iterator[tuple[str, Callable[[], Path]]]:
    for mix in MIXES:
        yield f"quantize --format gguf, {mix}", partial(_mixed, mix, work / f"{mix}.gguf")


def _mixed(mix: str, target: Path) -> Path:
    options = ["--bits", mix, "--samples", "4", "--seq", "64", "--report", "none", "-o", str(target)]
    command = [sys.executable, "-m", "mycli.cli", "quantize", str(PICO), "--format", "gguf", *options]
    subprocess.run(command, check=True, capture_output=True)
    return target


def reader_of(label: str, model: Path) -> tuple[str, ...]:
    """Return the readers of a model; none for MLX, which runs on Apple's machines."""
    if model.is_file():
        return "gguf-py", "llama.cpp"
    if label.endswith("mlx"):
        return ()
    if label.endswith(("gptq", "awq")):
        return ("gptqmodel",) if "mixture" in label else ("transformers", "gptqmodel")
    return ("transformers",)


def _safetensors(model: Path, ending: str, change: Callable[[Tensor], Tensor], target: Path) -> Path:
    shutil.copytree(model, target)
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith(ending))
    tensors[name] = change(tensors[name].clone()).contiguous()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def _gguf(model: Path, name: str, change: Callable[[Tensor], Tensor], target: Path) -> Path:
    data = bytearray(model.read_bytes())
    entry = GgufFiles.open(model).header.tensors[name]
    values = torch.frombuffer(data, dtype=torch.uint8, offset=entry.offset, count=entry.nbytes)
    values.copy_(change(values.clone()).flatten())
    target.write_bytes(data)
    return target


def _negate(scales: Tensor) -> Tensor:
    scales[2, 0] = -scales[2, 0]  # GPTQ has a row for each group: three
    return scales


def _swap(rows: Tensor) -> Tensor:
    rows[[3, 7]] = rows[[7, 3]]
    return rows


def faults(work: Path, gptqmodel: Path, llama: Path) -> Iterator[tuple[str, str, Path | None, Path, Path]]:
    """Yield name, reader, program, the damaged model and the good one."""
    mixture = work / "mixture"
    make_exported(mixture, "qwen3_moe-8top2")
    dense = export(mixture, "gguf:f32", work / "mixture.gguf")
    blocks = export(PICO, "gguf:q8_0", work / "blocks.gguf")
    width = 256 // 32 * 34  # a row of blocks, each with its scale first

    def flip(data: Tensor) -> Tensor:
        data[5 * width + 1] ^= 0x80
        return data

    def swap_blocks(data: Tensor) -> Tensor:
        return _swap(data.view(-1, width))

    def transpose(data: Tensor) -> Tensor:
        experts = data.view(torch.float32).view(8, 64, -1)
        experts[3] = experts[3].T.reshape(experts[3].shape).clone()
        return experts.view(torch.uint8)

    for reader, program in (("gguf-py", None), ("llama.cpp", llama)):
        q, down = "blk.1.attn_q.weight", "blk.1.ffn_down_exps.weight"
        yield "scale", reader, program, _gguf(blocks, q, flip, work / f"{reader}-1.gguf"), blocks
        yield "row", reader, program, _gguf(blocks, q, swap_blocks, work / f"{reader}-2.gguf"), blocks
        yield "expert", reader, program, _gguf(dense, down, transpose, work / f"{reader}-3.gguf"), dense
    int4 = packed(PICO, Recipe(method="rtn", bits=4, group=32), work / "int4")
    down = "layers.1.mlp.experts.3.down_proj.weight"
    mixture4 = export(
        packed(mixture, Recipe(method="rtn", bits=4, group=32), work / "mixture4"), "gptq", work / "mixture4-gptq"
    )
    expert_scales = "layers.1.mlp.experts.3.down_proj.scales"
    bad = _safetensors(mixture4, expert_scales, _negate, work / "mixture4-scale")
    yield "scale of an expert of gptq", "gptqmodel", gptqmodel, bad, mixture4

    def transpose_expert(values: Tensor) -> Tensor:
        return values.T.reshape(values.shape).clone()

    for name, ending, change, good in (
        ("scale", "q_proj.weight_scale", _negate, int4),
        ("row", "q_proj.weight_packed", _swap, int4),
        ("expert", down, transpose_expert, mixture),
    ):
        bad = _safetensors(good, ending, change, work / f"packed-{name}")
        yield name, "transformers", None, bad, good
    for to in ("gptq", "awq"):
        good = export(int4, to, work / f"{to}-good")
        for name, ending, change in (("scale", "q_proj.scales", _negate), ("row", "q_proj.qweight", _swap)):
            yield (
                f"{name} of {to}",
                "transformers",
                gptqmodel,
                _safetensors(good, ending, change, work / f"{to}-{name}"),
                good,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path)
    parser.add_argument("--gptqmodel", type=Path)
    parser.add_argument("--parts", nargs="*", default=["formats", "mixtures", "mixes", "faults"])
    parser.add_argument("--only", default="", metavar="WORD")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        parts = [part(work) for part in (formats, mixtures, mixes) if part.__name__ in given.parts]
        for label, make in (item for part in parts for item in part if given.only in item[0]):
            model = make()
            for reader in reader_of(label, model):
                packages = reader == "gptqmodel" or label.endswith(("gptq", "awq", "quantize, nf4"))
                program = given.llama_cpp if reader == "llama.cpp" else given.gptqmodel if packages else None
                print(f"| {label} | {reader} | {verified(model, reader, program)} |", flush=True)
            if not reader_of(label, model):
                print(f"| {label} | none | compared with mlx itself by test_foreign_layouts |", flush=True)
        if "faults" in given.parts:
            for label, reader, program, bad, good in faults(work, given.gptqmodel, given.llama_cpp):
                print(f"| planted: {label} | {reader} | {verified(bad, reader, program, good)} |", flush=True)


if __name__ == "__main__":
    main()
