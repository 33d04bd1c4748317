"""The limits of `mycli quantize` and the words of its plan."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mycli.cli.flags.gates import Gates
from mycli.cli.reports.plot import LayerError
from mycli.cli.reports.quantization import _output_error, show_outcome, steps
from mycli.quant.calls.record import CallCounts, CallQuality, TokenAgreement
from mycli.quant.output.model_card import Size
from mycli.quant.planning.plan import plan_quantization
from mycli.quant.planning.settings import PlanSettings
from mycli.quant.recipe import Recipe
from mycli.runtime.errors import GateError
from mycli.runtime.hub.resolve import resolve

AGREEMENT = TokenAgreement(9, 0.02, 0.975)
OPEN = Gates(max_kl=None, max_call_loss=None, max_fallback=1)


def outcome(kl: float | None = 0.25, after: int = 14, fallbacks: int = 0) -> Any:
    calls = CallQuality(24, AGREEMENT, {}, CallCounts(20, 18), CallCounts(after, 9))
    report = SimpleNamespace(kl=kl, calls=calls)
    return SimpleNamespace(report=report, folder=Path("out"), fallbacks=fallbacks, layers=["layer"] * 14)


@pytest.mark.parametrize(
    ("gates", "kept", "broken", "problem"),
    [
        (replace(OPEN, max_kl=0.25), {"kl": 0.25}, {"kl": 0.2501}, "mean KL of 0.2501 is above --max-kl 0.25"),
        (replace(OPEN, max_call_loss=0.25), {"after": 14}, {"after": 13}, r"fell by 29\.2% of the prompts"),
        (replace(OPEN, max_fallback=0.5), {"fallbacks": 7}, {"fallbacks": 8}, "8 of 14 layers were only rounded"),
        (replace(OPEN, max_fallback=0), {"fallbacks": 0}, {"fallbacks": 1}, "1 of 14 layers were only rounded"),
    ],
    ids=["kl", "calls", "fallbacks", "no-fallback"],
)
def test_a_result_at_a_limit_passes_and_one_beyond_it_does_not(
    gates: Gates, kept: dict[str, Any], broken: dict[str, Any], problem: str
) -> None:
    gates.check(outcome(**kept))
    with pytest.raises(GateError, match=problem) as error:
        gates.check(outcome(**broken))
    assert "the model was written to out" in str(error.value.hint)
    OPEN.check(outcome(**broken))


def test_without_a_measurement_no_kl_is_too_large() -> None:
    replace(OPEN, max_kl=0.1).check(outcome(kl=None))


def test_the_output_error_is_the_mean_of_the_layers_that_have_one() -> None:
    errors = [LayerError("a", 0.01, 0.02), LayerError("b", 0.02, 0.05), LayerError("c", 0.9, None)]
    assert _output_error(errors) == "1.500% on average, 3.500% with rounding to nearest"
    assert _output_error(errors[2:]) is None


@pytest.mark.parametrize("label", ["file", "folder"])
def test_card_and_json_say_whether_the_result_is_a_file(tmp_path: Path, label: str) -> None:
    target = tmp_path / "result"
    if label == "file":
        target.write_bytes(b"GGUF")
    cards: list[list[tuple[str, str]]] = []
    answers: list[dict[str, Any]] = []
    out = SimpleNamespace(answered=answers.append, card=lambda title, rows: cards.append(rows))
    report = SimpleNamespace(record={}, evaluation=None, calls=None, head=None, activations=None)
    size = Size(8, 8, 8.0, 8, 4.0)
    result: Any = SimpleNamespace(folder=target, size=size, report=report, layers=(), notes=())
    call: Any = SimpleNamespace(out=out)
    show_outcome(call, result, [])
    assert cards[0][0] == (label, str(target))
    assert {key: answers[0][key] for key in ("file", "folder") if key in answers[0]} == {label: str(target)}


def test_a_plan_names_the_steps_in_order() -> None:
    source = resolve("pico", offline=True)
    short = Recipe(samples=8, seq=64)

    def named(recipe: Recipe, report: Any = "none") -> list[str]:
        return steps(plan_quantization(source, recipe, PlanSettings(report)))

    assert named(replace(short, method="rtn"), "quick") == ["rtn of 42 layers", "measure the quality on 8192 tokens"]
    solved = "gptq of 42 layers in 6 blocks on 8 windows of 64 tokens"
    assert named(short) == [solved]
    assert named(replace(short, hessian="model", tune=True)) == [
        "measure gradients of the model",
        solved,
        "tune the result",
    ]
    tuned = replace(short, target_bpw=3.5, tune=True, tune_codes=True)
    assert named(tuned) == ["choose bits for a mean of 3.5", solved, "tune the result, codes included"]
