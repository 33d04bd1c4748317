"""Exports a folder as `mycli export` does, and reads the values of a model."""

from pathlib import Path

import torch
from torch import Tensor

from mycli.quant.export import Exported, ExportRequest, find_export_target
from mycli.quant.export._weights import Weights
from mycli.quant.progress import silent
from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.hub.resolve import Source
from tests.support import quantizing
from tests.support.families import CASES, make


def export_to(folder: Path, to: str, target: Path, **options: bool) -> Exported:
    module, variant = find_export_target(to)
    request = ExportRequest(Source(folder.name, folder), open_model_folder(folder), target, variant, **options)
    return module.export(request, silent)


def dense_values(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model in fp32, packed weights dequantized."""
    opened = open_model_folder(folder)
    weights = Weights(opened)
    return {name: weights.dense(name).float() for name, _ in opened.config.tensors()}


# Sizes that fill groups of 32 and words of AWQ.
WIDE = {
    **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def packed_family(folder: Path, case: str, recipe: Recipe, **changes: int) -> Path:
    """Return the folder of a random model of a family, quantized."""
    model_type, others = CASES[case]
    make(folder / "dense", model_type, {**others, **changes})
    return quantizing.make(Source("dense", folder / "dense"), folder / "packed", recipe).folder
