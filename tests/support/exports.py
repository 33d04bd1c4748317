"""Exports a folder as `mycli export` does, and reads the values of a model."""

from pathlib import Path

from torch import Tensor

from mycli.quant.export import Exported, ExportRequest, find_export_target
from mycli.quant.export._weights import Weights
from mycli.quant.progress import silent
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.hub.resolve import Source


def export_to(folder: Path, to: str, target: Path, **options: bool) -> Exported:
    module, variant = find_export_target(to)
    request = ExportRequest(Source(folder.name, folder), open_model_folder(folder), target, variant, **options)
    return module.export(request, silent)


def dense_values(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model in fp32, packed weights dequantized."""
    opened = open_model_folder(folder)
    weights = Weights(opened)
    return {name: weights.dense(name).float() for name, _ in opened.config.tensors()}
