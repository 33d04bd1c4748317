"""A small random model to quantize, and what quantizing it leaves."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from mycli.quant.pipeline import quantize
from mycli.quant.planning.plan import QuantizationPlan, plan_quantization
from mycli.quant.recipe import Recipe
from mycli.runtime.hub.resolve import Source
from tests.support.models import CPU

GROUP_32 = Recipe("rtn", group=32)


DATA = Recipe("gptq", group=32, samples=8, seq=48)


def rewrite(source: Source, name: str, change: Any) -> None:
    tensors = load_file(source.folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, source.folder / "model.safetensors", metadata={"format": "pt"})


def make(source: Source, target: Path, recipe: Recipe = GROUP_32, **options: Any) -> QuantizationPlan:
    work = plan_quantization(source, recipe, report=options.pop("report", "none"))
    quantize(work, target, CPU, **options)
    return work


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in ("source", ".locks"))
