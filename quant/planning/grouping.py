"""Which copies of a model are solved together, in one pass over its blocks, and the disk that they need."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from mycli.quant.planning.memory import Need
from mycli.quant.planning.plan import QuantizationPlan
from mycli.quant.planning.target import OutputTarget
from mycli.runtime.device.system import memory
from mycli.runtime.models.experts_spec import ExpertsSpec


def solved_together(works: Sequence[QuantizationPlan]) -> list[list[int]]:
    """Return the indices of plans of one model in groups, each for one call of `quantize_copies`.

    A group has the same calibration windows and batches, and fits in memory.
    """
    groups: list[list[int]] = []
    for index, work in enumerate(works):
        for group in groups:
            joined = [works[other] for other in group] + [work]
            if len({_batches(plan) for plan in joined}) == 1 and _fit(joined):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def _batches(work: QuantizationPlan) -> tuple[object, ...]:
    # Copies that are equal in this can be observed together. Tokens of a mixture go where each copy's router sends
    # them; tuning takes longer than all that could be shared.
    recipe = work.recipe
    alone = any(isinstance(spec.mlp, ExpertsSpec) for spec in work.config.layer_specs) or recipe.tune
    if alone or not recipe.needs_data:
        return (object(),)
    return work.settings.text, recipe.samples, work.seq, recipe.seed, work.need.at_once


def _fit(works: Sequence[QuantizationPlan]) -> bool:
    limit = works[0].settings.max_ram
    need, available = sum_of_needs(works), memory().available
    return need.host <= (available if limit is None else min(limit, available)) and not need.device


def sum_of_needs(works: Iterable[QuantizationPlan]) -> Need:
    """Return the most memory that copies need which are solved together."""
    needs = [work.need for work in works]
    return Need(sum(need.host for need in needs), sum(need.device for need in needs), needs[0].at_once)


def disk_of_groups(groups: Iterable[Sequence[tuple[QuantizationPlan, OutputTarget]]]) -> list[tuple[Path, int]]:
    """Return the folders that copies write to, which are made group by group, with their bytes."""
    # All results stay; the blocks of a group are removed before the next one begins, and copies end one by one.
    results, replaced, blocks = [], [(Path(), 0)], [[(Path(), 0)]]
    for group in groups:
        results += [work.result_need(target.path) for work, target in group]
        replaced += [work.replaced_need(target.path) for work, target in group]
        blocks.append([work.blocks_need(target.work_folder) for work, target in group])
    largest = max(blocks, key=lambda needs: sum(nbytes for _, nbytes in needs))
    return [*results, *largest, max(replaced, key=lambda need: need[1])]
