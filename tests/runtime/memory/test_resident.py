"""Test which experts stay in memory: as many as fit, at least those of one token, and at most the limit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.runtime.errors import ResourceError, UsageError
from mycli.runtime.memory.ceiling import (
    bytes_per_step,
    chosen_expert_bytes,
    tokens_per_second,
    tokens_per_second_from_disk,
)
from mycli.runtime.memory.estimate import estimate
from mycli.runtime.memory.fit import PackingScheme
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.resident import slot_bytes, with_active_experts, with_fitting_experts
from mycli.runtime.memory.weights import linears_bytes, weight_bytes
from mycli.runtime.quantization.scheme import Packing
from tests.support.published import published

GIB = 1 << 30
CONFIG = published("Qwen3-30B-A3B")
MIXTURE = MemoryPlan(CONFIG, PackingScheme(Packing(4, 128)).packings(CONFIG))
EXPERTS, CHOSEN, LAYERS = 128, 8, 48
# int4 in groups of 128 with 2-byte scales: three products of 768 by 2048.
EXPERT = 3 * 768 * 2048 * (4 + 16 / 128) / 8


def test_a_slot_is_an_expert_of_each_layer() -> None:
    assert slot_bytes(MIXTURE) == LAYERS * EXPERT
    for slots in (0, CHOSEN, EXPERTS - 1):
        absent = weight_bytes(MIXTURE) - weight_bytes(replace(MIXTURE, expert_slots=slots))
        assert absent == (EXPERTS - slots) * LAYERS * EXPERT
    assert weight_bytes(replace(MIXTURE, expert_slots=EXPERTS)) == weight_bytes(MIXTURE)


def test_a_slot_holds_the_largest_expert_of_a_layer() -> None:
    packings = {name: packing for name, packing in MIXTURE.packings.items() if ".0.mlp.experts.5." not in name}
    assert len(packings) == len(MIXTURE.packings) - 3
    assert slot_bytes(replace(MIXTURE, packings=packings)) == (LAYERS - 1) * EXPERT + 3 * 768 * 2048 * 2


def test_where_all_fit_all_are_kept() -> None:
    assert with_fitting_experts(MIXTURE, 80 * GIB).expert_slots is None
    assert with_fitting_experts(MIXTURE, estimate(MIXTURE).total).expert_slots is None


@given(free=st.integers(3 * GIB, 20 * GIB), started=st.booleans())
@settings(max_examples=12, deadline=None)
def test_as_many_as_fit_are_kept_but_for_a_part_that_the_page_cache_has(free: int, started: bool) -> None:
    plan = with_fitting_experts(MIXTURE, free, started=started)
    if plan.expert_slots is None:
        assert estimate(MIXTURE).total - estimate(MIXTURE).runtime * started <= free
        return
    found = estimate(plan)
    needed = found.needed if started else found.total
    assert plan.expert_slots == CHOSEN or needed <= free
    more = (free - needed) / slot_bytes(plan)
    assert plan.expert_slots == CHOSEN or more < 1 + (plan.expert_slots + 1) / 15


def test_a_mixture_of_35_billion_fits_where_24_gigabytes_are_less_than_it() -> None:
    config = published("Qwen3.5-35B-A3B")
    plan = MemoryPlan(config, PackingScheme(Packing(8, 128)).packings(config))
    free = 22 * GIB
    assert estimate(plan).total > free
    kept = with_fitting_experts(plan, free)
    assert kept.expert_slots is not None and 128 < kept.expert_slots < 256
    assert estimate(kept).total <= free


def test_without_room_for_what_a_token_goes_through_that_is_what_is_needed() -> None:
    plan = with_fitting_experts(MIXTURE, GIB)
    assert plan == with_active_experts(MIXTURE) and plan.expert_slots == CHOSEN
    assert estimate(plan).total > GIB


@pytest.mark.parametrize("slots", [1, 5, 20, 127])
def test_a_limit_is_kept_even_where_it_is_less_than_a_token_goes_through(slots: int) -> None:
    each = slot_bytes(MIXTURE)
    assert with_fitting_experts(MIXTURE, 80 * GIB, slots * each).expert_slots == slots
    assert with_fitting_experts(MIXTURE, 80 * GIB, (slots + 1) * each - 1).expert_slots == slots


def test_a_limit_that_holds_all_or_none() -> None:
    each = slot_bytes(MIXTURE)
    assert with_fitting_experts(MIXTURE, 80 * GIB, EXPERTS * each).expert_slots is None
    with pytest.raises(ResourceError, match=r"for experts: one expert of each layer takes"):
        with_fitting_experts(MIXTURE, 80 * GIB, each - 1)
    assert with_fitting_experts(MIXTURE, 4 * GIB, 80 * GIB) == with_fitting_experts(MIXTURE, 4 * GIB)


ELSEWHERE = {
    "gpu": replace(MIXTURE, gpu=True),
    "copy": replace(MIXTURE, prompt_copy="16bit"),
    "dense": MemoryPlan(published("Llama-3.1-8B")),
}


@pytest.mark.parametrize("other", ELSEWHERE)
def test_elsewhere_all_are_kept_and_a_limit_is_refused(other: str) -> None:
    plan = ELSEWHERE[other]
    assert with_fitting_experts(plan, GIB) == plan
    with pytest.raises(UsageError, match="expert memory limit applies only"):
        with_fitting_experts(plan, GIB, GIB)


@pytest.mark.parametrize("batch", [1, 4])
def test_from_disk_a_step_waits_for_the_experts_that_its_tokens_choose(batch: int) -> None:
    plan = replace(MIXTURE, batch=batch, expert_slots=CHOSEN)
    layers = [spec.mlp for spec in CONFIG.layer_specs]
    all_of_them = sum(linears_bytes(plan, (each for mlp in one.experts for each in mlp.linears)) for one in layers)
    chosen = chosen_expert_bytes(plan)
    assert chosen == pytest.approx(all_of_them * (1 - ((EXPERTS - CHOSEN) / EXPERTS) ** batch), rel=1e-9)
    seconds = bytes_per_step(plan, 100) / 50e9 + chosen / 2e9
    assert tokens_per_second_from_disk(plan, 100, 50, 2) == pytest.approx(batch / seconds)
    assert tokens_per_second(plan, 100, 50) == tokens_per_second(replace(plan, expert_slots=None), 100, 50)
