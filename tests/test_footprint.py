"""The estimate against what a real process allocates, on pico."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from mycli.runtime.config import Dtype
from mycli.runtime.device import TORCH_DTYPES, Placement
from mycli.runtime.errors import ExitCode, GateError
from mycli.runtime.estimate import Plan
from mycli.runtime.footprint import Part, check, measure
from mycli.runtime.packing import describe

FOLDER = Path(str(files("mycli.runtime"))) / "pico" / "pico"
EXACT = ("weights", "embeddings and head", "cache")


def plan(**changes: object) -> Plan:
    config, packings = describe(FOLDER)
    return replace(Plan(config, packings, context=1024), **changes)  # type: ignore[arg-type]  # names of Plan's fields


@pytest.mark.parametrize("dtype, batch", [("bfloat16", 1), ("float32", 2)])
def test_weights_and_cache_are_what_was_predicted(dtype: Dtype, batch: int) -> None:
    parts = measure(FOLDER, plan(dtype=dtype, batch=batch), Placement(torch.device("cpu"), TORCH_DTYPES[dtype]))
    assert [part.name for part in parts] == ["runtime", *EXACT, "workspace", "total"]
    for part in parts:
        if part.name in EXACT:
            assert abs(part.error) <= 0.001, part
    assert parts[0].actual > 0  # the workspace may be nothing in a process that has freed memory to use again
    total = parts[-1]
    assert total.actual == sum(part.actual for part in parts[:-1])


def test_a_wrong_prediction_is_caught() -> None:
    parts = measure(FOLDER, plan(dtype="float32"), Placement(torch.device("cpu"), torch.bfloat16))
    with pytest.raises(GateError, match=r"weights -50.0%.*cache -50.0%") as caught:
        check(parts, 0.03)
    assert caught.value.exit_code == ExitCode.GATE


@pytest.mark.parametrize(
    "part, passes",
    [
        (Part("cache", 100, 102, True), True),
        (Part("cache", 100, 104, True), False),
        (Part("cache", 100, 96, True), False),
        (Part("total", 100, 50, False), True),
        (Part("total", 100, 104, False), False),
        (Part("workspace", 100, 300, False), True),  # only as part of the total
        (Part("cache", 0, 1, True), False),
        (Part("cache", 0, 0, True), True),
    ],
)
def test_gate(part: Part, passes: bool) -> None:
    if passes:
        check([part], 0.03)
    else:
        with pytest.raises(GateError, match=part.name):
            check([part], 0.03)
