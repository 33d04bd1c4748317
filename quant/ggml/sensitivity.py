"""Chooses the type of each linear for a file of a given size by its effect on the output distribution (KL)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mycli.quant import pipeline
from mycli.quant.ggml import types
from mycli.quant.ggml.plan import GgufPlan, kind_bytes, plan_gguf
from mycli.quant.ggml.recipe import GgufRecipe
from mycli.quant.ggml.solve import round_blocks
from mycli.quant.planning.mixed_precision import COPY_WINDOWS, add_shares, low_width, spend_bytes, width_units
from mycli.quant.planning.plan import plan_quantization
from mycli.quant.planning.settings import PlanSettings
from mycli.quant.progress import ReportProgress, silent
from mycli.quant.recipe import Recipe
from mycli.quant.rounding.grid import Grid, relative_error, round_to_nearest
from mycli.quant.source_weights import SourceWeights
from mycli.runtime.checkpoint.gguf.blocks import dequantize_blocks
from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME
from mycli.runtime.device.placement import Placement, torch_dtype
from mycli.runtime.errors import UsageError
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import Packing

# By size. Types that lose more than another one of their size are left out.
KINDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
_NARROW_KINDS = ("IQ4_NL", "Q5_0", "Q5_1", "Q8_0")  # for rows that do not fill super-blocks
# Rows of a linear that are rounded to each type to compare the types; all rows would cost a quantization per type.
_SAMPLED_ROWS = 256
_GROUP = 32  # of the temporary copy


@dataclass(frozen=True)
class KindChoice:
    """The linears that get one type: those of a product, or of all experts. bytes, loss (KL): by type."""

    names: tuple[str, ...]
    bytes: dict[str, int]
    loss: dict[str, float]

    @property
    def smallest(self) -> str:
        return min(self.bytes, key=self.bytes.__getitem__)


def choose_kinds(work: GgufPlan, target: Path, placement: Placement, progress: ReportProgress = silent) -> GgufRecipe:
    """Return the recipe with the types for its `target_size`, measured with a temporary copy next to `target`.

    Raises UsageError for a size that the smallest types exceed.
    """
    assert work.recipe.target_size is not None
    choices = _measure(work, target, placement, progress)
    # The size of all other tensors does not depend on the choice, so it is taken from a plan with the smallest types.
    first = {f"{name}.weight": choice.smallest for choice in choices for name in choice.names}
    smallest = replace(work.recipe, kinds=tuple(first.items()))
    least = plan_gguf(work.source, smallest, work.settings, work.folder).layout.nbytes
    chosen = spend(choices, work.recipe.target_size - least)
    kinds = tuple(
        (f"{name}.weight", kind) for choice, kind in zip(choices, chosen, strict=True) for name in choice.names
    )
    return replace(work.recipe, kinds=kinds)


def spend(choices: list[KindChoice], budget: int) -> list[str]:
    """Return the type of each choice; `budget`: bytes beyond the smallest types. Raises UsageError below 0."""
    if budget < 0:
        raise UsageError(f"the smallest types take {-budget} bytes more than the target", "choose a larger size")
    losses = [choice.loss for choice in choices]
    return spend_bytes([choice.bytes for choice in choices], losses, [choice.smallest for choice in choices], budget)


def _measure(work: GgufPlan, target: Path, placement: Placement, progress: ReportProgress) -> list[KindChoice]:
    recipe, config = work.recipe, work.config
    assert recipe.target_size is not None
    bits = low_width(8 * recipe.target_size / config.parameters(), _GROUP)
    low = Recipe(bits=bits, group=_GROUP, samples=min(recipe.samples, COPY_WINDOWS), seq=recipe.seq, seed=recipe.seed)
    copy = plan_quantization(work.source, low, PlanSettings("none", work.settings.text), work.folder)
    copy = replace(copy, balances=False)  # a GGUF file has no rescaled columns
    shares = pipeline.copy_shares(copy, target, placement, work.need.at_once, progress)
    source = SourceWeights(work.folder)
    groups = [linears for layer in config.layer_specs for linears in layer.products().values()]
    choices = []
    for unit in width_units(config, by_tensor=True):
        share, products = add_shares([shares[place] for place in unit]), [groups[place] for place in unit]
        linears = [linear for product in products for linear in product]
        if linears[0].name not in work.packings:
            continue
        shapes = [(linear.out_features, linear.in_features) for linear in linears]
        weights = [_sampled(source, together) for together in zip(*products, strict=True)]
        kinds = _NARROW_KINDS if shapes[0][1] % TYPES_BY_NAME["Q4_K"].block else KINDS
        errors = {kind: _error(weights, kind) for kind in kinds}
        grid = Grid(Packing(bits, _GROUP), torch_dtype(config.dtype))
        at_low = sum(relative_error(weight, round_to_nearest(weight, grid)[0], grid) for weight in weights) or 1.0
        choices.append(
            KindChoice(
                tuple(linear.name for linear in linears),
                {kind: sum(kind_bytes(shape, kind) for shape in shapes) for kind in errors},
                {kind: share.loss[bits] * len(weights) * error / at_low for kind, error in errors.items()},
            )
        )
    return choices


def _sampled(source: SourceWeights, linears: Sequence[LinearSpec]) -> torch.Tensor:
    """Return rows [n, K] of linears of one shape, as many of each."""
    rows = max(1, _SAMPLED_ROWS // len(linears))
    return torch.cat([source.read(f"{linear.name}.weight")[:rows] for linear in linears]).float()


def _error(weights: list[torch.Tensor], kind: str) -> float:
    # Mean relative squared error of rounding. The loss of a type is the measured loss of the copy times the ratio of
    # the two errors: measuring each type in the model would take a pass over the calibration text per type and layer.
    total = 0.0
    for weight in weights:
        values = dequantize_blocks(round_blocks(weight, types.load(kind)), kind)
        total += float((values - weight).square().sum() / weight.square().sum().clamp(min=1e-30))
    return total / len(weights)
