"""Test the plan of a copy: the length of its windows, and which copies of a model are solved together."""

from dataclasses import replace
from pathlib import Path

import pytest

from mycli.quant.planning.grouping import disk_of_groups, solved_together
from mycli.quant.planning.plan import QuantizationPlan, plan_quantization
from mycli.quant.planning.settings import PlanSettings
from mycli.quant.planning.target import OutputTarget
from mycli.quant.recipe import DEFAULT_SEQ, Recipe
from mycli.runtime.hub.resolve import Source
from tests.support.models import random_model
from tests.support.quantizing import UNMEASURED

DATA = Recipe("gptq", group=32, samples=8, seq=48)


@pytest.mark.usefixtures("short_calibration_text")
def test_copies_with_the_same_windows_that_fit_in_memory_are_solved_together(tmp_path: Path) -> None:
    source = Source("small", random_model(tmp_path / "source"), None, None)
    recipes = [
        DATA,
        Recipe("rtn", group=32),
        replace(DATA, bits=2, method="awq"),
        replace(DATA, tune=True),
        replace(DATA, samples=16),
    ]
    works = [plan_quantization(source, recipe, UNMEASURED) for recipe in [*recipes, replace(DATA, bits=3)]]
    assert solved_together(works) == [[0, 2, 5], [1], [3], [4]]
    both = works[0].need.host + works[2].need.host
    limited = [replace(work, settings=PlanSettings("none", max_ram=both)) for work in works]
    assert solved_together(limited) == [[0, 2], [1], [3], [4], [5]]


def test_room_for_both_results_is_needed_where_a_head_is_chosen(tmp_path: Path) -> None:
    source, target = Source("small", random_model(tmp_path / "source")), tmp_path / "out"
    auto, dense, packed = (
        plan_quantization(source, replace(DATA, head=head), PlanSettings()) for head in ("auto", "keep", "int8")
    )

    def total(work: QuantizationPlan) -> int:
        return sum(nbytes for _, nbytes in work.disk_needs(target, None))

    assert total(auto) == total(dense) + packed.size.bytes


@pytest.mark.usefixtures("short_calibration_text")
def test_the_disk_of_groups_holds_all_results_and_the_blocks_of_the_largest(tmp_path: Path) -> None:
    source = Source("small", random_model(tmp_path / "source"))
    recipes = [DATA, replace(DATA, bits=3), replace(DATA, samples=16), Recipe("rtn", group=32)]
    copies = [
        (plan_quantization(source, recipe, PlanSettings()), OutputTarget(tmp_path / str(number)))
        for number, recipe in enumerate(recipes)
    ]
    results = sum(work.result_need(target.path)[1] for work, target in copies)
    blocks = copies[0][0].blocks_need(tmp_path / "work")[1]
    replaced = max(work.size.bytes for work, _ in copies)
    needs = disk_of_groups([copies[:2], copies[2:3], copies[3:]])
    assert blocks > 0 and sum(nbytes for _, nbytes in needs) == results + 2 * blocks + replaced
    assert disk_of_groups([]) == [(Path(), 0)] * 2


@pytest.mark.parametrize(("context", "seq"), [(DEFAULT_SEQ // 2, DEFAULT_SEQ // 2), (2 * DEFAULT_SEQ, DEFAULT_SEQ)])
def test_windows_fit_into_a_short_context(context: int, seq: int, tmp_path: Path) -> None:
    source = Source("small", random_model(tmp_path / "source", max_position_embeddings=context), None, None)
    assert plan_quantization(source, replace(DATA, seq=None), UNMEASURED).seq == seq
