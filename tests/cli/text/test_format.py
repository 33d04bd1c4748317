"""The words of cards and status lines."""

from types import SimpleNamespace
from typing import Any

import pytest

from mycli.cli.text.format import (
    activation_rows,
    active_parameters,
    call_rows,
    compact,
    draft_statistics,
    file_activation_rows,
    speed_statistics,
)
from mycli.quant.calls.record import CallCounts, CallQuality, TokenAgreement
from mycli.runtime.engine.stats import Timing
from mycli.runtime.quantization.activations import (
    MAX_ADDED_KL,
    MAX_MOVED_KL,
    ActivationKl,
    choose_activations,
    choose_by_file,
)


@pytest.mark.parametrize(
    ("passes", "speedup", "words"),
    [(3, 1.62, ["draft 71% (1.6x)"]), (3, None, ["draft 71%"]), (0, None, ["draft off"])],
)
def test_drafts_are_described(passes: int, speedup: float | None, words: list[str]) -> None:
    timing: Any = SimpleNamespace(record=SimpleNamespace(passes=passes, acceptance_rate=0.71), speedup=speedup)
    assert draft_statistics(timing) == words
    timing.record = None
    assert draft_statistics(timing) == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [([], ["0 tok"]), ([0.022], ["1 tok", "TTFT 22 ms"]), ([0.022, 0.02], ["2 tok", "50 tok/s", "TTFT 22 ms"])],
)
def test_a_reply_stopped_early_has_no_speed(seconds: list[float], words: list[str]) -> None:
    assert speed_statistics(len(seconds), Timing(token_seconds=seconds)) == words


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (999, "999"),
        (1000, "1.0k"),
        (999_949, "999.9k"),
        (10**6, "1.0M"),
        (999_949_999, "999.9M"),
        (10**9, "1.0B"),
        (8_030_261_248, "8.0B"),
    ],
)
def test_counts_are_shortened_from_the_first_of_each_size_on(count: int, text: str) -> None:
    assert compact(count) == text


@pytest.mark.parametrize(("active", "text"), [(8_000_000_000, ""), (3_300_000_000, ", 3.3B active per token")])
def test_only_a_mixture_has_active_parameters(active: int, text: str) -> None:
    config: Any = SimpleNamespace(active_parameters=lambda: active, parameters=lambda: 8_000_000_000)
    assert active_parameters(config) == text


@pytest.mark.parametrize("eight", [102.0, 103.0, 104.0], ids=["below", "at-the-limit", "above"])
def test_the_card_says_which_activations_auto_uses(eight: float) -> None:
    assert ActivationKl(100.0, 103.0).added == MAX_ADDED_KL
    measured = ActivationKl(100.0, eight)
    ((_, text),) = activation_rows(measured)
    used = choose_activations("auto", measured, tiles=False).bits
    assert text.endswith("auto uses them" if used == 8 else "auto uses 16: the limit is 3%")
    moved = MAX_MOVED_KL * eight / 103
    ((_, text),) = file_activation_rows(moved)
    assert text.endswith("auto uses them" if choose_by_file(moved).bits == 8 else "auto uses 16: the limit is 0.001")
    assert activation_rows(None) == []


def test_valid_calls_have_a_row_if_both_models_were_counted() -> None:
    agreement, counts = TokenAgreement(9, 0.02, 0.975), CallCounts(20, 18)
    shown = [
        dict(call_rows(CallQuality(24, agreement, {"names": agreement}, before, after)))
        for before, after in ((counts, CallCounts(14, 9)), (counts, None), (None, counts))
    ]
    assert shown[0]["valid calls"] == "20 → 14 of 24 prompts; as expected 18 → 9"
    assert [list(rows) for rows in shown[1:]] == [["call tokens"]] * 2
