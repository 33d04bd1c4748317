"""What other quantizers make of the same model, the same calibration tokens and the same grid, beside ours.

    PYTHONPATH=.links python -m tests.peers.peers --compressor ENV/bin/python [--model FOLDER] [--bits 4] [--group 128]

`--compressor` is the Python of an environment with llm-compressor (`pip install llmcompressor`); without it those rows
are left out, and a line says so. Their folders are packed as ours are, so one evaluator reads both: KL to the original
on the package's held-out text.
"""

import argparse
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from mycli.quant import calibration
from mycli.quant.evaluate import cut, evaluate, held_out_text
from mycli.quant.pipeline import plan, quantize
from mycli.quant.recipe import Recipe
from mycli.quant.streaming import StreamedModel
from mycli.runtime.device import Placement
from mycli.runtime.hub import Source
from mycli.runtime.tokenizer import Tokenizer
from tests.conftest import PICO

CPU = Placement(torch.device("cpu"), torch.float32)
CHILD = Path(__file__).with_name("compressor_child.py")


def compressor(python: Path, source: Path, windows: Path, target: Path, bits: int, group: int, method: str) -> None:
    """llm-compressor's copy of `source` at `target`. Raises RuntimeError with the end of what it said."""
    command = [str(python), str(CHILD), str(source), str(windows), str(target), str(bits), str(group), method]
    done = subprocess.run(command, capture_output=True, text=True, cwd=windows.parent)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compressor", type=Path)
    parser.add_argument("--model", type=Path, default=PICO)
    parser.add_argument("--bits", type=int, nargs="+", default=[4])
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16384)
    options = parser.parse_args()
    original = StreamedModel(options.model, CPU)
    tokenizer = Tokenizer.load(options.model, original.config.vocab_size)
    windows = calibration.bundled(tokenizer, original.config.vocab_size, options.samples, 512, seed=0).windows
    text = cut(held_out_text(), tokenizer, 512, options.tokens)
    print(f"torch {torch.__version__}, python {platform.python_version()}, {torch.get_num_threads()} threads")
    if options.compressor is None:
        print("llm-compressor: not installed (--compressor)")
    print("\n| bits | by | method | KL | perplexity | same top token |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(windows, folder / "windows.pt")
        for bits in options.bits:
            made: list[tuple[str, str, Path]] = []
            for method in ("rtn", "gptq") if options.compressor else ():
                target = folder / f"theirs-{method}-{bits}"
                tokens = folder / "windows.pt"
                compressor(options.compressor, options.model, tokens, target, bits, options.group, method)
                made.append(("llm-compressor", method, target))
            for method in ("rtn", "gptq"):
                target = folder / f"ours-{method}-{bits}"
                recipe = Recipe(method=method, bits=bits, group=options.group, samples=options.samples, seq=512)
                source = Source(options.model.name, options.model, None, None)
                quantize(plan(source, recipe, report="none"), target, CPU)
                made.append(("mycli", method, target))
            for by, method, target in made:
                found = evaluate(StreamedModel(target, CPU), text, original)
                assert found.divergence is not None
                kl, same = found.divergence.kl, found.divergence.same_top1
                print(
                    f"| {bits} | {by} | {method} | {kl.value:.4f} ± {kl.error:.4f} | {found.perplexity.value:.2f} "
                    f"| {same.value:.1%} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
