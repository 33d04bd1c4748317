"""Measures what prompts in 8-bit floats cost: divergence from the model in fp32, as packed and with E4M3 copies.

PYTHONPATH=.links python -m tests.benchmarks.fp8_prompts [MODEL] [--bits 8 4 3 2]

Every token of a window is computed in one pass, so all products of the blocks but those of small sizes are in E4M3. The
numbers are those of a GPU, which adds the products in another order; they are computed on the CPU.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from mycli.quant.evaluate import cut, evaluate_each, held_out_text
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.utils.dtypes import PromptCopy
from tests.support.quantizing import make


def main() -> None:
    """Print a row for each width of the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="pico")
    parser.add_argument("--bits", type=int, nargs="*", default=[8, 4, 3, 2])
    arguments = parser.parse_args()
    source = resolve(arguments.model)
    original = open_model_folder(source.folder)
    text = cut(held_out_text(), original.tokenizer(), 512)
    exact = StreamedModel(original, Placement(torch.device("cpu"), torch.float32))
    kinds: tuple[PromptCopy, ...] = get_args(PromptCopy)
    placement = Placement(torch.device("cpu"), torch.bfloat16, activations="16")
    print(f"| bits | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}")
    with tempfile.TemporaryDirectory() as folder:
        for bits in arguments.bits:
            target = Path(folder) / str(bits)
            make(source, target, Recipe(bits=bits), "quick")
            packed = open_model_folder(target)
            models = [StreamedModel(packed, replace(placement, prompt_copy=kind)) for kind in kinds]
            found = [result.divergence for result in evaluate_each(models, text, exact)]
            figures = " | ".join(f"{divergence.kl.value:.5f}" for divergence in found if divergence is not None)
            print(f"| {bits} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
