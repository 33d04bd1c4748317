"""Memory is planned before it is taken."""

from importlib.resources import files
from pathlib import Path

import pytest
import torch

from mycli.runtime import load
from mycli.runtime.device import Placement
from mycli.runtime.errors import ResourceError
from mycli.runtime.estimate import Plan, estimate
from mycli.runtime.packing import describe

PICO = Path(str(files("mycli.runtime"))) / "pico" / "pico"
CPU = Placement(torch.device("cpu"), torch.float32)


def needed(context: int, batch: int = 1) -> int:
    return estimate(Plan(describe(PICO)[0], context=context, batch=batch, dtype="float32")).needed


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    amount: int = request.param
    monkeypatch.setattr(load, "free_memory", lambda device: amount)
    return amount


@pytest.mark.parametrize("free, context", [(1 << 40, 2048), (needed(512), 512)], indirect=["free"])
def test_without_a_wish_the_models_context_or_what_fits(free: int, context: int) -> None:
    assert load.plan_memory(PICO, CPU, None) == context


@pytest.mark.parametrize("free", [needed(1024)], indirect=True)
def test_a_wish_is_kept_or_refused(free: int) -> None:
    assert load.plan_memory(PICO, CPU, 1024) == 1024
    with pytest.raises(ResourceError, match=r"main memory: .* needed .* free"):
        load.plan_memory(PICO, CPU, 1040)
    with pytest.raises(ResourceError, match="needed"):
        load.plan_memory(PICO, CPU, 1024, sequences=2)


@pytest.mark.parametrize("free", [1 << 20], indirect=True)
def test_no_memory_at_all_is_an_error_not_a_tiny_context(free: int) -> None:
    with pytest.raises(ResourceError):
        load.plan_memory(PICO, CPU, None)
