"""Compares pico in every supported layout with the original: KL of each package's rounding and of our own 4 bits.

    PYTHONPATH=.links:EXTRA python -m tests.benchmarks.layouts [--llama BIN] [--tokens 8192] [--only WORD ...]

Each row is the result of `mycli eval FOLDER --ref pico --tokens N` on a folder or file that another program wrote.
PYTHONPATH lists the folders of packages that are not test dependencies (auto-round, bitsandbytes, mlx); BIN holds
llama-quantize and llama-imatrix, which IQ1 and IQ2 need (computed on the calibration text). Rounding is to nearest
except in llama.cpp's K and IQ types, which search, and in the rows that name a method.
"""

import argparse
import json
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mycli.quant.evaluate import TokenWindows, cut, evaluate, held_out_text
from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.progress import ReportProgress, silent
from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.hub.resolve import Source
from tests.benchmarks import gguf as files
from tests.benchmarks.layout_makers import MAKERS, Made
from tests.support.models import CPU
from tests.support.paths import PICO
from tests.support.quantizing import make

_WEIGHTS = "model.safetensors"
_EMBEDDING = "model.embed_tokens"
_OWN = (
    ("our int4-g32, rtn", Recipe(method="rtn", bits=4, group=32)),
    ("our int4-g32, gptq", Recipe(bits=4, group=32, samples=32, seq=512)),
    ("our int3-g32, gptq", Recipe(bits=3, group=32, samples=32, seq=512)),
    ("our int2-g32, gptq", Recipe(bits=2, group=32, samples=32, seq=512)),
    ("our int8-g32, rtn", Recipe(method="rtn", bits=8, group=32)),
    ("our nf4-g64, double quantized", Recipe(method="nf4", group=64)),
)
_EXPORTED = ("gptq", "awq", "mlx", "gguf", "safetensors:fp32")  # from the first of `_OWN`, without loss
_ROUNDED = ("gguf:q8_0", "gguf:q4_0", "gguf:q4_k")  # from pico
_PLAIN = ("Q8_0", "Q6_K", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K_S", "Q2_K")
_SEARCHED = (
    "IQ3_S",
    "IQ3_XXS",
    "IQ2_M",
    "IQ2_XS",
    "IQ2_XXS",
    "IQ1_M",
    "IQ1_S",
)  # need an importance matrix; only IQ2_M uses IQ2_S
_TERNARY = ("TQ2_0", "TQ1_0")
_MIXED = ("Q5_K_M", "Q4_K_M", "Q3_K_M")  # as in files on the hub: several types, the embedding in Q6_K

Row = tuple[str, str, Path]  # layout, maker, model


def own(work: Path) -> Iterator[Row]:
    """Yield the models that `quantize` writes."""
    for name, recipe in _OWN:
        target = work / name.replace(" ", "-")
        yield (
            name,
            "mycli",
            make(Source("pico", PICO), target, recipe).folder,
        )


def exported(work: Path) -> Iterator[Row]:
    """Yield the exports of our 4-bit model and of the original."""
    packed = work / _OWN[0][0].replace(" ", "-")
    if not packed.exists():
        recipe = _OWN[0][1]
        make(Source("pico", PICO), packed, recipe)
    for source, targets in ((packed, _EXPORTED), (PICO, _ROUNDED)):
        for to in targets:
            module, variant = find_export_target(to)
            path = work / f"export-{source.name}-{to.replace(':', '-')}{'.gguf' if 'gguf' in to else ''}"
            folder = open_model_folder(source)
            rounded = source == PICO
            module.export(ExportRequest(Source(source.name, source), folder, path, variant, rounded), silent)
            yield f"{'pico' if rounded else _OWN[0][0]} exported as {to}", "mycli", path


def made(work: Path) -> Iterator[Row]:
    """Yield the model of each layout package, one folder after the other."""
    for maker in MAKERS:
        try:
            for one in maker():
                yield one.name, one.maker, _folder(work / one.name.replace(" ", "-"), one)
        except ImportError as error:
            print(f"skipped: {maker.__name__} ({error})", flush=True)


def _folder(folder: Path, one: Made) -> Path:
    """Write pico with its linears, and for some layouts its embedding, replaced by a package's tensors."""
    shutil.copytree(PICO, folder, ignore=shutil.ignore_patterns(_WEIGHTS, "config.json"))
    tensors = load_file(PICO / _WEIGHTS)
    for name in [*_linears(), *([_EMBEDDING] if one.embedding else [])]:
        for part, tensor in one.pack(tensors.pop(f"{name}.weight")).items():
            tensors[f"{name}.{part}"] = tensor.contiguous()
    save_file(tensors, folder / _WEIGHTS)
    config = json.loads((PICO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **one.section}))
    return folder


def _linears() -> list[str]:
    config = open_model_folder(PICO).config
    blocks = (config.layer(layer).products() for layer in range(config.layers))
    return [spec.name for block in blocks for group in block.values() for spec in group]


def llama(work: Path, programs: Path) -> Iterator[Row]:
    """Yield llama-quantize's outputs for pico's GGUF: each type with an unquantized embedding, and the mixtures."""
    source, matrix, text = work / "pico-bf16.gguf", work / "matrix.gguf", work / "text.txt"
    module, variant = find_export_target("gguf")
    module.export(ExportRequest(Source("pico", PICO), open_model_folder(PICO), source, variant), silent)
    text.write_text((resources.files("mycli.quant") / "calibration_text" / "prose.txt").read_text("utf-8")[:200_000])
    _call(programs / "llama-imatrix", "-m", source, "-f", text, "-o", matrix, "-c", 512, "--chunks", 32, "-t", 1)
    pure = ("--pure", "--token-embedding-type", "bf16", "--output-tensor-type", "bf16")
    kinds: list[tuple[str, tuple[object, ...]]] = [(kind, pure) for kind in (*_PLAIN, *_TERNARY)]
    kinds += [(kind, ("--imatrix", matrix, *pure)) for kind in _SEARCHED]
    for kind, options in [*kinds, *((kind, ()) for kind in _MIXED)]:
        path = work / f"pico-{kind}.gguf"
        _call(programs / "llama-quantize", *options, source, path, kind, 1)
        how = ", importance matrix" if kind in _SEARCHED else ", embedding too" if kind in _MIXED else ""
        yield f"GGUF {kind}{how}", "llama.cpp", path


def _call(program: Path, *arguments: object) -> None:
    ran = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, errors="replace")
    if ran.returncode:
        raise SystemExit(f"{program.name} failed ({ran.returncode}):\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}")


def stored_bits(model: Path) -> float:
    """Return the stored bits per weight of the blocks' linears, including scales and other metadata."""
    if model.is_file():
        return files.linears(model, PICO)[0]
    config = open_model_folder(PICO).config
    shapes = dict(config.tensors())
    names = _linears()
    tensors = load_file(model / _WEIGHTS)
    nbytes = sum(part.nbytes for key, part in tensors.items() if key.startswith(tuple(f"{name}." for name in names)))
    return 8 * nbytes / sum(shapes[f"{name}.weight"][0] * shapes[f"{name}.weight"][1] for name in names)


class Original(StreamedModel):
    def __init__(self) -> None:
        super().__init__(open_model_folder(PICO), CPU)
        self._known: Tensor | None = None

    def hidden(self, tokens: Tensor, progress: ReportProgress = silent) -> Tensor:
        if self._known is None:
            self._known = super().hidden(tokens, progress)
        return self._known


def row(text: TokenWindows, original: Original, name: str, maker: str, model: Path) -> str:
    """Return a line of the table: the in-memory representation of the model and its KL to pico."""
    folder = open_model_folder(model)
    held = sorted({packing.name for linear, packing in folder.packings.items() if linear in _linears()})
    result = evaluate(StreamedModel(folder, CPU), text, original)
    assert result.divergence is not None
    kl = result.divergence.kl
    cells = (
        name,
        maker,
        f"{stored_bits(model):.2f}",
        ", ".join(held) or "dense",
        f"{kl.value:.2g} ± {kl.error or 0:.1g}",
        f"{result.perplexity.value:.2f}",
        f"{result.divergence.same_top1.value:.1%}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, help="where llama-quantize and llama-imatrix lie")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--only", nargs="*", default=["own", "exported", "made", "llama"])
    given = parser.parse_args()
    text = cut(held_out_text(), open_model_folder(PICO).tokenizer(), 512, given.tokens)
    print(f"torch {torch.__version__}, python {platform.python_version()}; {text.windows.numel()} held-out tokens\n")
    print("| layout | made by | bits a weight in the file | in memory | KL from pico | perplexity | same top token |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        work, original = Path(name), Original()
        parts = {"own": own(work), "exported": exported(work), "made": made(work)}
        if given.llama is not None:
            parts["llama"] = llama(work, given.llama)
        for part in given.only:
            for one in parts.get(part, ()):
                print(row(text, original, *one), flush=True)


if __name__ == "__main__":
    main()
