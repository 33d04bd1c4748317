"""Test that the parts of an estimate add up to its totals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mycli.cli.reports.estimate_card import BANDWIDTH_HINT, EstimateSubject, _number, estimate_json, estimate_rows
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.probe import Target
from mycli.runtime.memory.ceiling import tokens_per_second
from mycli.runtime.memory.estimate import estimate
from mycli.runtime.memory.fit import PackingScheme
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import PromptCopy
from mycli.runtime.utils.units import GIB
from tests.support.packed_mixture import FIELDS
from tests.support.paths import PICO
from tests.support.published import PUBLISHED


def test_the_parts_of_the_workspace_are_its_total() -> None:
    folder = open_model_folder(PICO)
    subject = EstimateSubject(
        "pico", folder, MemoryPlan(folder.config), Target("cpu", "CPU", False, GIB), PackingScheme()
    )
    answer = estimate_json(subject, None)
    parts = answer["workspace_bytes"]
    assert sum(parts.values()) == answer["bytes"]["workspace"] > 0
    assert parts["kept"] > 0, "the name that scripts read"


def test_a_draft_has_a_row_of_its_own() -> None:
    folder = open_model_folder(PICO)
    plan, target = MemoryPlan(folder.config), Target("cpu", "CPU", False, GIB)
    cards = []
    for chosen in (plan, replace(plan, draft=plan)):
        subject = EstimateSubject("pico", folder, chosen, target, PackingScheme())
        cards.append(dict(estimate_rows(subject, estimate_json(subject, None))))
    assert cards[1].keys() - cards[0].keys() == {"draft"}
    assert cards[1]["draft"].endswith(" MiB") and cards[1]["weights"] == cards[0]["weights"]


def test_the_weights_are_named_by_their_packings_or_their_dtype() -> None:
    folder = open_model_folder(PICO)
    plan, target = MemoryPlan(folder.config), Target("cpu", "CPU", False, GIB)
    names = {linear.name: Packing(4, 64) for linear in folder.config.linears()}
    mixed = {**names, "lm_head": Packing(8, None)}
    plans = [replace(plan, packings=mixed), replace(plan, packings=names), replace(plan, dtype="float16"), plan]
    found = [EstimateSubject("pico", folder, each, target, PackingScheme()).scheme_name for each in plans]
    assert found == [f"int4-g64+{Packing(8, None).name}", "int4-g64", "float16", folder.config.dtype]


def test_a_copy_for_prompts_is_named_by_its_width() -> None:
    folder = open_model_folder(PICO)
    packed = MemoryPlan(folder.config, {linear.name: Packing(4, 64) for linear in folder.config.linears()}, gpu=True)
    kinds: dict[PromptCopy, str] = {"none": "int4-g64)", "fp8": "for an 8-bit copy)", "16bit": "for a 16-bit copy)"}
    for kind, end in kinds.items():
        plan = replace(packed, prompt_copy=kind)
        subject = EstimateSubject("pico", folder, plan, Target("cuda", "GPU", True, GIB), PackingScheme())
        assert dict(estimate_rows(subject, estimate_json(subject, None)))["weights"].endswith(end)


def test_the_cache_of_a_token_does_not_depend_on_the_context() -> None:
    """pico: keys and values of 6 layers with 2 heads of 64 in bf16; the cache itself has whole blocks."""
    folder = open_model_folder(PICO)
    for context, batch in ((2, 1), (100, 3), (2048, 1)):
        plan = MemoryPlan(folder.config, context=context, batch=batch)
        subject = EstimateSubject("pico", folder, plan, Target("cpu", "CPU", False, GIB), PackingScheme())
        cache = dict(estimate_rows(subject, estimate_json(subject, None)))["KV cache"]
        assert cache.endswith(f"({context} tokens x {batch}, 3.0 KiB per token)")


def test_the_cache_of_layers_with_a_window_is_of_fixed_size(tmp_path: Path) -> None:
    """Five layers of six hold 47 blocks of 64 tokens, whatever the context."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["gemma-3-4b"]["config"]))
    folder = open_model_folder(tmp_path)
    for context, batch, content in (
        (32768, 1, "32768 tokens x 1, 20.0 KiB per token; 341 MiB for 29 layers with a window of 1024"),
        (2048, 1, "2048 tokens x 1, 136.0 KiB per token"),
    ):
        plan = MemoryPlan(folder.config, context=context, batch=batch)
        subject = EstimateSubject("gemma", folder, plan, Target("cpu", "CPU", False, GIB), PackingScheme())
        assert content in dict(estimate_rows(subject, estimate_json(subject, None)))["KV cache"]


@pytest.mark.parametrize(
    ("spare", "verdict"),
    [
        (3 << 20, "fits, 3 MiB to spare"),
        (0, "fits, 0 bytes to spare"),
        (-1, "does not fit: 1 byte too much"),
    ],
)
def test_the_verdict_is_that_of_the_answer(spare: int, verdict: str) -> None:
    folder = open_model_folder(PICO)
    plan = MemoryPlan(folder.config)
    target = Target("cpu", "CPU", False, estimate(plan).total + spare)
    subject = EstimateSubject("pico", folder, plan, target, PackingScheme())
    answer = estimate_json(subject, None)
    assert answer["fits"] is (spare >= 0) and dict(estimate_rows(subject, answer))["verdict"] == verdict


def test_the_ceilings_are_of_an_empty_and_a_full_cache() -> None:
    folder = open_model_folder(PICO)
    plan = MemoryPlan(folder.config, context=2048)
    target = Target("cpu", "CPU", False, GIB, 0.25, "data sheet")
    subject = EstimateSubject("pico", folder, plan, target, PackingScheme())
    rates = [tokens_per_second(plan, depth, 0.25) for depth in (0, 2048)]
    rows = dict(estimate_rows(subject, estimate_json(subject, None)))
    assert rates[1] < 100
    assert (
        rows["ceiling"] == f"{rates[0]:.1f} tok/s empty, {rates[1]:.1f} tok/s at 2048 tokens  (0.25 GB/s, data sheet)"
    )
    fast = replace(subject, target=replace(target, bandwidth=250.0))
    thousands = dict(estimate_rows(fast, estimate_json(fast, None)))["ceiling"]
    assert thousands.startswith(f"{1000 * rates[0]:,.0f} tok/s empty, ")
    unknown = replace(subject, target=replace(target, bandwidth=None))
    assert dict(estimate_rows(unknown, estimate_json(unknown, None)))["ceiling"] == BANDWIDTH_HINT
    assert _number(99.96) == "100.0" and _number(100) == "100" and _number(1234.4) == "1,234"


def test_the_longest_context_is_named_as_the_models_limit_only_where_it_is() -> None:
    folder = open_model_folder(PICO)
    plan = MemoryPlan(folder.config, context=256)
    rows = []
    for free in (GIB, estimate(replace(plan, context=1024)).total):
        subject = EstimateSubject("pico", folder, plan, Target("cpu", "CPU", False, free), PackingScheme())
        rows.append(dict(estimate_rows(subject, estimate_json(subject, None)))["longest context"])
    assert rows == [f"{folder.config.max_context} tokens, the model's limit", "1024 tokens"]


@pytest.mark.parametrize(("layers", "end"), [(1, "128"), (2, "128 (2 layers)")])
def test_what_hinders_tensor_parallelism_is_named_with_the_number_of_its_layers(
    layers: int, end: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FIELDS, "num_hidden_layers": layers}))
    folder = open_model_folder(tmp_path)
    plan = MemoryPlan(folder.config, {linear.name: Packing(4, 32) for linear in folder.config.linears()})
    subject = EstimateSubject("m", folder, plan, Target("cpu", "CPU", False, GIB), PackingScheme())
    found = estimate_json(subject, 4)["tensor_parallel"]
    assert not found["possible"] and f"o_proj: 32 inputs per rank, not a multiple of {end}" in found["obstacles"]
