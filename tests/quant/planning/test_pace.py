"""Time estimates of a dry run grow in proportion to the work."""

from dataclasses import replace

import pytest
import torch

from mycli.quant.planning import pace
from mycli.quant.planning.pace import choosing_seconds, expected_seconds
from mycli.quant.planning.plan import plan_quantization
from mycli.quant.planning.settings import PlanSettings, Report
from mycli.quant.recipe import Recipe
from mycli.runtime.device.placement import Placement
from mycli.runtime.hub.resolve import resolve
from tests.support.quantizing import UNMEASURED

CPU = Placement(torch.device("cpu"), torch.float32)
SMALL = Recipe(samples=8, seq=64)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_SECONDS", 0.01)


def told(recipe: Recipe, report: Report = "none") -> float:
    return expected_seconds(plan_quantization(resolve("pico", offline=True), recipe, PlanSettings(report)), CPU)


def test_solving_grows_with_the_cube_of_the_size_and_with_the_rows() -> None:
    whole, products, factors = (pace._multiplications(8, 32, *parts) for parts in ((31, 3.7), (31, 0), (0, 3.7)))
    assert whole == products + factors and products > 0 and factors > 0
    assert pace._multiplications(16, 64, 31, 3.7) == 8 * whole
    assert pace._multiplications(16, 32, 31, 3.7) == 2 * products + factors


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_report_takes_longer(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_seconds", lambda task: (task(), 1e-3)[1])
    monkeypatch.setattr(pace, "_rounding", lambda *_: 1.0)
    without, quick, full = (told(replace(SMALL, method=method), report) for report in ("none", "quick", "full"))
    assert without and quick and full and 0 < without < quick < full
    assert full - without == pytest.approx(4 * (quick - without)), "four times the tokens"


def test_time_grows_with_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_seconds", lambda task: (task(), 1e-3)[1])
    one, two, three = (told(replace(SMALL, samples=8 * times)) for times in (1, 2, 3))
    assert one and two and three and three - two == pytest.approx(two - one) and two > one


def test_output_moments_take_passes_for_each_of_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_seconds", lambda task: 0.0)
    monkeypatch.setattr(pace, "_solving", lambda *_: 0.0)
    monkeypatch.setattr(pace, "_passing", lambda *_: 1e-3)
    plain, model = (told(replace(SMALL, hessian=hessian)) for hessian in ("layer", "model"))
    layers = plan_quantization(resolve("pico", offline=True), SMALL, UNMEASURED).config.layers
    assert model - plain == pytest.approx(layers * 1e-3 * pace._OUTPUT_PASSES * SMALL.samples * 64)


def test_a_report_on_a_cpu_passes_its_tokens_also_with_activations_of_other_widths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "_seconds", lambda task: 0.0)
    monkeypatch.setattr(pace, "_rounding", lambda *_: 0.0)
    monkeypatch.setattr(pace, "_passing", lambda *_: 1e-3)
    work = plan_quantization(resolve("pico", offline=True), replace(SMALL, method="rtn"), PlanSettings("quick"))
    passes = pace._REPORT_PASSES + pace._ACTIVATION_PASSES
    assert expected_seconds(work, CPU) == pytest.approx(work.config.layers * 1e-3 * passes * work.measured_tokens)


def test_it_is_measured_here() -> None:
    for method in ("rtn", "gptq"):
        seconds = told(replace(SMALL, method=method))
        assert 0 < seconds < 3600


def test_transforms_and_tuning_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_seconds", lambda task: (task(), 1e-3)[1])
    plain, transformed, tuned = (
        told(replace(SMALL, **change)) for change in ({}, {"method": "awq+gptq"}, {"tune": True})
    )
    assert 1.2 * plain < transformed < 5 * plain and tuned == pytest.approx(10 * plain)


def test_choosing_widths_takes_a_copy_and_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_seconds", lambda task: (task(), 1e-3)[1])
    work = plan_quantization(resolve("pico", offline=True), replace(SMALL, target_bpw=3.5), UNMEASURED)
    assert told(replace(SMALL, bits=3)) < choosing_seconds(work, CPU) < 10 * told(replace(SMALL, bits=3))
