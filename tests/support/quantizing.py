"""A small random model to quantize, and what quantizing it leaves."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from mycli.quant.pipeline import Outcome, quantize
from mycli.quant.planning.plan import plan_quantization
from mycli.quant.planning.settings import PlanSettings, Report
from mycli.quant.planning.target import OutputTarget
from mycli.quant.recipe import Recipe
from mycli.runtime.hub.resolve import Source
from tests.support.models import CPU

GROUP_32 = Recipe("rtn", group=32)
DATA = Recipe("gptq", group=32, samples=8, seq=48)
UNMEASURED = PlanSettings("none")


def rewrite(source: Source, name: str, change: Any) -> None:
    tensors = load_file(source.folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, source.folder / "model.safetensors", metadata={"format": "pt"})


def make(
    source: Source, target: Path, recipe: Recipe = GROUP_32, report: Report = "none", *, overwrite: bool = False
) -> Outcome:
    return quantize(plan_quantization(source, recipe, PlanSettings(report)), OutputTarget(target, overwrite), CPU)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in ("source", ".locks"))
