"""Test the size of context and cache: the requested plan without a limit, and what remains of it in less memory."""

from dataclasses import replace

import pytest

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.loading.sizing import fitting_plan, requested_plan
from mycli.runtime.memory.estimate import estimate
from mycli.runtime.memory.fit import SHORTEST_CONTEXT
from mycli.runtime.memory.plan import DEFAULT_CONTEXT
from tests.support.paths import PICO

FOLDER = open_model_folder(PICO)
LONG = replace(FOLDER, config=replace(FOLDER.config, max_context=1 << 20))


@pytest.mark.parametrize(
    ("options", "long", "context", "batch"),
    [
        ({}, False, 2048, 1),
        ({}, True, DEFAULT_CONTEXT, 1),
        ({"sequences": 3}, True, DEFAULT_CONTEXT, 3),
        ({"context": 100, "sequences": 3}, False, 100, 3),
        ({"context": 100, "sequences": 3, "running": 9}, False, 100, 3),
        # Sequences that share a cache may each be as long as the model allows.
        ({"sequences": 3, "running": 9}, True, 3 * DEFAULT_CONTEXT, 1),
        ({"sequences": 3, "running": 9}, False, 2048, 3),
        ({"sequences": 1, "running": 9}, False, 2048, 1),
    ],
)
def test_the_plan_without_a_limit(options: dict[str, int], long: bool, context: int, batch: int) -> None:
    plan = requested_plan(LONG if long else FOLDER, EngineConfig(**options))  # type: ignore[arg-type]  # numbers
    assert (plan.context, plan.batch, plan.running) == (context, batch, options.get("running"))


def test_weights_are_planned_as_they_will_be_stored() -> None:
    engine = EngineConfig(prompt_copy="int8", kv="int8")
    packed, unpacked = (requested_plan(FOLDER, engine, FOLDER, unpacked=unpacked) for unpacked in (False, True))
    assert packed.draft is not None and unpacked.draft is not None and requested_plan(FOLDER, engine).draft is None
    assert (packed.packings, packed.draft.packings, packed.prompt_copy) == (FOLDER.packings, FOLDER.packings, "int8")
    assert (unpacked.packings, unpacked.draft.packings, unpacked.prompt_copy) == ({}, {}, "none")
    assert packed.kv == packed.draft.kv == "int8"
    assert requested_plan(FOLDER, replace(engine, draft="ngram")).drafts_without_model
    assert not packed.drafts_without_model
    assert requested_plan(FOLDER, replace(engine, dtype="bfloat16")).dtype == "bfloat16"
    assert requested_plan(FOLDER, engine, dtype="float16").dtype == "float16"


def test_a_context_that_was_not_asked_for_is_the_longest_that_fits() -> None:
    engine = EngineConfig()
    requested = requested_plan(FOLDER, engine)
    free = estimate(replace(requested, context=1024)).needed
    plan = fitting_plan(requested, engine, free)
    assert plan.context == 1024 and estimate(plan).needed <= free
    assert fitting_plan(requested, engine, estimate(requested).needed) == requested
    assert fitting_plan(requested, engine, 1).context == SHORTEST_CONTEXT, "too large, and refused later"
    chosen = EngineConfig(context=2048)
    assert fitting_plan(requested_plan(FOLDER, chosen), chosen, free).context == 2048


def test_a_shared_cache_shrinks_by_halves_before_its_sequences_do() -> None:
    engine = EngineConfig(context=1024, sequences=12, running=16)
    requested = requested_plan(FOLDER, engine)
    for batch, expected in ((12, 12), (11, 6), (6, 6), (5, 3), (2, 1)):
        assert fitting_plan(requested, engine, estimate(replace(requested, batch=batch)).needed).batch == expected
    for batch in (12, 8):
        assert fitting_plan(replace(requested, batch=batch), engine, 1).batch == 1
    fixed = replace(engine, running=None)
    assert fitting_plan(requested_plan(FOLDER, fixed), fixed, 1).batch == 12, "as many as asked for, or an error"
