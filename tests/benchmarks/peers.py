"""Compares other quantizers with ours on the same model and the same calibration tokens.

    PYTHONPATH=.links python -m tests.benchmarks.peers --compressor ENV/bin/python --gptqmodel ENV/bin/python
        --auto-round ENV/bin/python --llama FOLDER [--model FOLDER] [--calibration-text FILE] [--held-out FILE]

Each ENV is an environment with that program (`pip install llmcompressor`, `gptqmodel`, `auto-round`), `--llama` the
folder of llama.cpp's programs (`tests.benchmarks.llama`; needs `pip install gguf`); without one its rows are left out,
with a message. All results are read by the same evaluator: KL to the original on the held-out text, by default the
package's. Bits per weight are counted from the files, over the linears of the blocks, scales included; embeddings and
head are not quantized.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mycli.quant.calibration import sampler as calibration
from mycli.quant.evaluate import cut, evaluate, held_out_text, read_text
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.pipeline import choose_widths, quantize
from mycli.quant.planning.plan import plan_quantization
from mycli.quant.planning.settings import PlanSettings
from mycli.quant.planning.target import OutputTarget
from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.hub.resolve import Source
from mycli.runtime.quantization.scheme import Packing, parse_packing
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.models import CPU
from tests.support.paths import PICO

CHILD = Path(__file__).with_name("peer_child.py")
# Programs with environments of their own, and the methods that each is asked for.
PROGRAMS = {"llm-compressor": ("rtn", "gptq"), "GPTQModel": ("gptq",), "auto-round": ("signround",)}
TYPES = ["Q8_0", "Q4_K_M", "Q4_0", "IQ4_XS", "Q3_K_M", "IQ3_S", "IQ3_XXS", "Q2_K", "IQ2_M", "IQ2_XS"]
MIXED = [4.7, 3.85, 3.4375, 2.93]  # the bits per weight of llama.cpp's mixtures
SCHEMES = [f"int{bits}-g{group}" for bits in (8, 4, 3, 2) for group in (128, 64, 32) if bits < 8 or group > 32]


@dataclass(frozen=True)
class Made:
    """Describes a quantized model folder: the program, the method, and the bits per weight."""

    by: str
    how: str
    bits: float
    folder: Path


@dataclass(frozen=True)
class Shown:
    """Holds the model of `source` and the calibration windows int64 [windows, context]; files go to `folder`.

    The windows are of `text`, or of the bundled text.
    """

    source: Path
    windows: Tensor
    folder: Path
    text: Path | None = None


def ours(shown: Shown, recipe: Recipe, how: str) -> Made:
    """Quantize with `recipe` on the same windows; `how` names the row."""
    target, (samples, seq) = shown.folder / f"ours-{recipe.name}", shown.windows.shape
    source = Source(shown.source.name, shown.source, None, None)
    work = plan_quantization(source, replace(recipe, samples=samples, seq=seq), PlanSettings("none", shown.text))
    if recipe.target_bpw is not None:
        work = plan_quantization(source, choose_widths(work, CPU, target), PlanSettings("none", shown.text))
    quantize(work, OutputTarget(target), CPU)
    return Made("mycli", how, packed_bits(target), target)


def theirs(program: str, python: Path, shown: Shown, method: str, packing: Packing) -> Made:
    """Quantize with one of `PROGRAMS`, run by `python`. Raises RuntimeError with the end of its output."""
    target, tokens = shown.folder / f"{program}-{method}-{packing.name}", shown.folder / "windows.pt"
    torch.save(shown.windows, tokens)
    numbers = str(packing.bits), str(packing.group_size)
    command = [python, CHILD, program, shown.source.absolute(), tokens, target, *numbers, method]
    workers = {"GPTQMODEL_CPU_WORKERS": "2"}  # with its default on two cores it does not start
    done = subprocess.run(command, capture_output=True, text=True, cwd=shown.folder, env=os.environ | workers)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shown.source / name, target / name)
    return Made(program, f"{method} {packing.name}", packed_bits(target), target)


def packed_bits(folder: Path) -> float:
    """Return the bits per weight of the quantized linears of a compressed-tensors or GPTQ folder, scales included.

    Zero points of GPTQ folders are left out: all are the middle of the grid.
    """
    opened = open_model_folder(folder)
    config, packings = opened.config, opened.packings
    tensors = Manifest.open(folder).tensors
    parts = [f"{name}.{part}" for name in packings for part in ("weight_packed", "weight_scale", "qweight", "scales")]
    nbytes = sum(tensors[part].nbytes for part in parts if part in tensors)
    blocks = (config.layer(layer).products() for layer in range(config.layers))
    specs = [spec for block in blocks for group in block.values() for spec in group]
    assert {spec.name for spec in specs} == set(packings), "a linear is not quantized, or the head is"
    return 8 * nbytes / sum(spec.out_features * spec.in_features for spec in specs)


def llama(programs: Path, shown: Shown, text: Tensor, kinds: list[str]) -> Iterator[Made]:
    """Yield all `kinds` by llama.cpp, without and with importance matrix, except those that it refuses.

    Raises ValueError if llama.cpp's perplexity of the unquantized file differs from ours, since then the models differ.
    """
    from tests.benchmarks.llama import Llama, second_half_perplexity

    peer = Llama(programs, shown.source, shown.folder)
    theirs, own = (
        peer.perplexity(peer.model, text),
        second_half_perplexity(StreamedModel(open_model_folder(shown.source), CPU), text),
    )
    print(f"llama.cpp {peer.version}: perplexity of the unquantized file {theirs:.4f}, by this program {own:.4f}")
    if abs(theirs / own - 1) > 1e-3:
        raise ValueError("llama.cpp reads another model than this program")
    imatrix = peer.imatrix(shown.windows)
    for kind in kinds:
        for given in (None, imatrix):
            try:
                folder, bits, types = peer.quantize(kind, given)
            except RuntimeError as error:
                print(f"llama.cpp: no {kind} {'with' if given else 'without'} importance matrix: {error}")
                continue
            held = ", ".join(f"{count} {name}" for name, count in types.most_common())
            yield Made("llama.cpp", f"{kind}{' + imatrix' if given else ''} ({held})", bits, folder)


def all_made(options: argparse.Namespace, shown: Shown, text: Tensor) -> Iterator[Made]:
    """Yield the results of every installed quantizer, ours last."""
    packings = [parse_packing(name) for name in options.schemes]
    if options.llama is None:
        print("llama.cpp: not installed (--llama)")
    else:
        yield from llama(options.llama, shown, text, options.types)
    pythons = {"llm-compressor": options.compressor, "GPTQModel": options.gptqmodel, "auto-round": options.auto_round}
    for program, python in pythons.items():
        if python is None:
            print(f"{program}: no environment given")
    for packing in packings:
        for program, methods in PROGRAMS.items():
            for method in methods if pythons[program] and packing.bits < 8 else ():
                try:
                    yield theirs(program, pythons[program], shown, method, packing)
                except RuntimeError as error:
                    print(f"{program}: no {method} {packing.name}: {error}")
        for method in ("rtn", "gptq") if packing.bits < 8 else ("gptq",):
            yield ours(shown, Recipe(method, packing.bits, packing.group_size), f"{method} {packing.name}")
    for bits in options.target_bpw:
        yield ours(shown, Recipe(group=64, target_bpw=bits), f"gptq g64 --target-bpw {bits:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compressor", type=Path)
    parser.add_argument("--gptqmodel", type=Path)
    parser.add_argument("--auto-round", type=Path)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--model", type=Path, default=PICO)
    parser.add_argument("--calibration-text", type=Path, help="default: the bundled text")
    parser.add_argument("--held-out", type=Path, help="text to measure on; default: the bundled text")
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--target-bpw", nargs="*", type=float, default=MIXED)
    parser.add_argument("--types", nargs="*", default=TYPES)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16384)
    options = parser.parse_args()
    original = StreamedModel(open_model_folder(options.model), CPU)
    tokenizer = Tokenizer.load(options.model, original.config.vocab_size)
    size = original.config.vocab_size
    shown = calibration.calibrate(options.calibration_text, tokenizer, size, options.samples, 512, seed=0)
    text = cut(read_text(options.held_out) if options.held_out else held_out_text(), tokenizer, 512, options.tokens)
    print(f"torch {torch.__version__}, python {platform.python_version()}, {torch.get_num_threads()} threads")
    rows: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as name:
        given = Shown(options.model, shown.windows, Path(name), options.calibration_text)
        for made in all_made(options, given, text.windows):
            found = evaluate(StreamedModel(open_model_folder(made.folder), CPU), text, original)
            assert found.divergence is not None
            kl, same = found.divergence.kl, found.divergence.same_top1
            digits = 4 if kl.value >= 0.001 else 6
            row = (
                f"| {made.bits:.3f} | {made.by} | {made.how} | {kl.value:.{digits}f} ± {kl.error:.{digits}f} "
                f"| {found.perplexity.value:.2f} | {same.value:.1%} |"
            )
            print(row, file=sys.stderr, flush=True)
            rows.append((made.bits, row))
    print("\n| bits per weight | by | how | KL | perplexity | same top token |\n|---|---|---|---|---|---|")
    for _, row in sorted(rows):
        print(row)


if __name__ == "__main__":
    main()
