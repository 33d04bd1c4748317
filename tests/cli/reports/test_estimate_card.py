"""Test that the parts of an estimate add up to its totals."""

from dataclasses import replace

from mycli.cli.reports.estimate_card import EstimateSubject, estimate_json, estimate_rows
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.probe import Target
from mycli.runtime.memory.fit import PackingScheme
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import PromptCopy
from mycli.runtime.utils.units import GIB
from tests.support.paths import PICO


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
