"""Measures the cost of a packed head: `pico` with an untied copy of its head, quantized with each `--head`.

PYTHONPATH=.links python -m tests.benchmarks.untied_head
"""

import json
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from mycli.quant.evaluate import cut, evaluate, held_out_text
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.pipeline import quantize
from mycli.quant.planning.plan import plan_quantization
from mycli.quant.recipe import Head, Recipe
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.hub.resolve import Source
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.models import CPU
from tests.support.paths import PICO

HEADS: tuple[Head, ...] = ("keep", "int8", "int4")


def untie(target: Path) -> None:
    """Write a copy of pico to `target` whose head is a separate tensor."""
    shutil.copytree(PICO, target, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    tensors = load_file(PICO / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, target / "model.safetensors")
    raw = json.loads((PICO / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": False}))


def main() -> None:
    """Print a row for each `--head`."""
    original = StreamedModel(open_model_folder(PICO), CPU)
    text = cut(held_out_text(), Tokenizer.load(PICO, original.config.vocab_size), 512, 16384)
    print("| head | KL | same top token |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        untie(Path(name) / "untied")
        for head in HEADS:
            target = Path(name) / head
            source = Source("untied", Path(name) / "untied", None, None)
            quantize(plan_quantization(source, Recipe(head=head), report="none"), target, CPU)
            found = evaluate(StreamedModel(open_model_folder(target), CPU), text, original).divergence
            assert found is not None
            print(f"| {head} | {found.kl.value:.4f} ± {found.kl.error:.4f} | {found.same_top1.value:.1%} |", flush=True)


if __name__ == "__main__":
    main()
