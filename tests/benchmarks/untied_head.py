"""Measures what a head in 8 bits costs: `pico` with an untied copy of its head, by the width of the layers.

PYTHONPATH=.links python -m tests.benchmarks.untied_head
"""

import json
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from mycli.quant.recipe import Recipe
from mycli.runtime.hub.resolve import Source
from tests.support.paths import PICO
from tests.support.quantizing import make


def untie(target: Path) -> None:
    """Write a copy of pico to `target` whose head is a separate tensor."""
    shutil.copytree(PICO, target, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    tensors = load_file(PICO / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, target / "model.safetensors")
    raw = json.loads((PICO / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": False}))


def main() -> None:
    """Print a row for each width of the layers."""
    print("| bits | KL, head unquantized | KL, head in 8 bits | added | chosen |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        source = Source("untied", Path(name) / "untied", None, None)
        untie(source.folder)
        for bits in (4, 3, 2, 8):
            head = make(source, Path(name) / str(bits), Recipe(bits=bits), "quick").report.head
            assert head is not None
            figures = f"{head.keep:.6f} | {head.int8:.6f} | {head.added:+.2%} | {head.record['chosen']}"
            print(f"| {bits} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
