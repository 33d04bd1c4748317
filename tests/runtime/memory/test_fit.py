"""Test the suggestions for a model that does not fit: each is correct and the smallest change of its kind."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.cli.remedies import remedy
from mycli.runtime.errors import ExitCode, ResourceError, UsageError
from mycli.runtime.memory.estimate import estimate
from mycli.runtime.memory.fit import SHORTEST_CONTEXT, PackingScheme, fit, preflight, schemes, shortage
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.units import GIB, human_bytes
from tests.support.published import published

LLAMA = MemoryPlan(published("Llama-3.1-8B"))


def test_schemes_use_the_largest_group_that_divides() -> None:
    assert [s.name(LLAMA.config) for s in schemes(LLAMA.config)] == [
        "bfloat16",
        "int8-g128",
        "int4-g128",
        "int3-g128",
        "int2-g128",
    ]
    assert schemes(published("SmolLM2-135M"))[1].packing == Packing(8, 64)  # 576 = 9 x 64
    odd = replace(published("SmolLM2-135M"), hidden_size=100)
    assert schemes(odd)[1].packing == Packing(8, None)


def test_a_group_that_does_not_divide_names_the_linear() -> None:
    with pytest.raises(UsageError, match=r"128 does not divide the 576 inputs of model.layers.0.self_attn.q_proj"):
        PackingScheme(Packing(4, 128)).packings(published("SmolLM2-135M"))
    untied = replace(published("SmolLM2-135M"), tie_embeddings=False)
    with pytest.raises(UsageError, match="lm_head"):
        PackingScheme(None, Packing(4, 128)).packings(untied)


def test_a_tied_head_is_not_quantized() -> None:
    with pytest.raises(UsageError, match="embedding"):
        PackingScheme(Packing(4, 64), Packing(8, 64)).packings(published("SmolLM2-135M"))


@pytest.mark.parametrize(
    "free, scheme, longest",
    [(80, "bfloat16", True), (24, "bfloat16", False), (12, "int8-g128", False), (8, "int4-g128", False)],
)
def test_fit_takes_the_best_scheme_then_the_longest_context(free: int, scheme: str, longest: bool) -> None:
    found = fit(LLAMA, free * GIB, None, schemes(LLAMA.config))
    assert found is not None
    chosen, choice = found
    assert choice.name(LLAMA.config) == scheme
    assert estimate(chosen).total <= free * GIB
    assert chosen.context >= 8192
    assert (chosen.context == 131072) is longest


def test_fit_keeps_a_context_that_was_asked_for() -> None:
    found = fit(LLAMA, 24 * GIB, 131072, schemes(LLAMA.config))
    assert found is not None and found[0].context == 131072
    assert found[1].packing == Packing(4, 128)  # 16 GiB of cache leave no room for more
    assert fit(LLAMA, 16 * GIB, 131072, schemes(LLAMA.config)) is None


def test_fit_uses_memory_to_the_last_byte() -> None:
    dense, enough = schemes(LLAMA.config)[:1], estimate(LLAMA).total
    assert fit(LLAMA, enough, LLAMA.context, dense) == (LLAMA, dense[0])
    assert fit(LLAMA, enough - 1, LLAMA.context, dense) is None


def test_fit_with_little_memory_shortens_the_usual_context() -> None:
    found = fit(LLAMA, 5 * GIB, None, schemes(LLAMA.config))
    assert found is not None and found[1].packing == Packing(2, 128) and 256 <= found[0].context < 8192
    assert fit(LLAMA, 2 * GIB, None, schemes(LLAMA.config)) is None


@pytest.mark.parametrize("max_context, shortest", [(131072, SHORTEST_CONTEXT), (100, 100)])
def test_fit_takes_no_context_below_the_shortest(max_context: int, shortest: int) -> None:
    plan = replace(LLAMA, config=replace(LLAMA.config, max_context=max_context))
    *_, last = choices = schemes(plan.config)
    enough = estimate(replace(plan, packings=last.packings(plan.config), context=shortest)).total
    found = fit(plan, enough, None, choices)
    assert found is not None and found[0].context == shortest and found[1] == last
    assert fit(plan, enough - 1, None, choices) is None


def test_preflight_does_not_count_the_runtime_which_has_started() -> None:
    exact = estimate(LLAMA).needed
    preflight(LLAMA, exact, "main memory")
    with pytest.raises(ResourceError):
        preflight(LLAMA, exact - 1, "main memory")


@pytest.mark.parametrize(
    "plan, free, change",
    [
        (replace(LLAMA, context=32768), 18, "--ctx"),
        (replace(LLAMA, draft=MemoryPlan(published("Llama-3.2-1B"))), 17.5, "--draft"),
        (replace(LLAMA, batch=64), 17.5, "--batch 1"),
        (LLAMA, 12, "mycli quantize MODEL --bits 8 --group 128"),
        (LLAMA, 0.5, "no single change"),
    ],
    ids=["F10-context", "F10-draft", "F10-batch", "F10-quantize", "F10-hopeless"],
)
def test_out_of_memory_names_needed_free_and_the_smallest_change(plan: MemoryPlan, free: float, change: str) -> None:
    with pytest.raises(ResourceError) as caught:
        preflight(plan, int(free * GIB) - estimate(plan).runtime, "cuda:0")
    assert caught.value.exit_code == ExitCode.RESOURCES
    assert f"{estimate(plan).total / GIB:.2f} GiB needed" in caught.value.message
    assert f"{human_bytes(free * GIB)} free" in caught.value.message
    assert change in remedy(caught.value)


@settings(max_examples=30)
@given(st.integers(min_value=17 * GIB, max_value=20 * GIB))
def test_a_proposed_context_really_fits(free: int) -> None:
    plan = replace(LLAMA, context=131072)
    proposed = shortage(plan, free, "cuda:0")
    context = proposed.data["context"]
    assert proposed.code == "set-context" and isinstance(context, int)
    assert estimate(replace(plan, context=context)).total <= free


def test_a_context_of_less_than_a_quarter_is_proposed_last() -> None:
    plan = replace(LLAMA, context=32768)
    quarter = estimate(replace(plan, context=8192)).total
    kept, shorter = shortage(plan, quarter, "cuda:0"), shortage(plan, quarter - 1, "cuda:0")
    assert (kept.code, kept.data) == ("set-context", {"context": 8192})
    assert shorter.code == "quantize", "although 8176 tokens fit"
    packed = replace(plan, packings=PackingScheme(Packing(2, 128)).packings(plan.config))
    least = estimate(replace(packed, context=SHORTEST_CONTEXT)).total
    last, none = (shortage(packed, free, "cuda:0") for free in (least, least - 1))
    assert (last.code, last.data) == ("set-context", {"context": SHORTEST_CONTEXT})
    assert none.code == "" and "no single change is enough" in none.hint


def test_without_a_single_change_the_missing_memory_is_named() -> None:
    missing = human_bytes(estimate(LLAMA).total - GIB)
    assert f"free {missing} more" in shortage(LLAMA, GIB, "cuda:0").hint


def test_an_estimate_that_fits_is_no_cause() -> None:
    total = estimate(LLAMA).total
    assert shortage(LLAMA, total, "cuda:0").code == "free-memory-or-less-context"
    assert "but memory ran out" in shortage(LLAMA, total, "cuda:0").message
    assert shortage(LLAMA, total - 1, "cuda:0").code == "set-context"
