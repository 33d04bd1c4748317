"""Test the upgrade guard: which speed changes are detected, which noise is ignored, and what a record holds."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.diagnostics import golden_record
from mycli.runtime.diagnostics.golden_record import GoldenRecord, compare_records, record, speed_change, undisturbed
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.open import open_model
from tests.support.paths import PICO

SAMPLES = 20


def session(source: random.Random, rate: float, interrupted: float = 0.0) -> list[float]:
    """Return samples of one session: 5 % noise each, a common offset of up to 2.5 %, some at half the speed."""
    offset = rate * (1 + source.uniform(-0.025, 0.025))
    slow = [0.5 if source.random() < interrupted else 1.0 for _ in range(SAMPLES)]
    return [offset * source.gauss(1, 0.05) * factor for factor in slow]


@pytest.mark.parametrize("interrupted", [0.0, 0.2], ids=["quiet", "interrupted"])
@pytest.mark.parametrize(
    ("factor", "verdict"), [(0.8, "slower"), (1.0, "no change"), (1.25, "faster")], ids=["-20%", "noise", "+25%"]
)
def test_a_fifth_is_found_and_noise_of_5_percent_is_not(factor: float, verdict: str, interrupted: float) -> None:
    source = random.Random(3)
    for _ in range(20):
        change = speed_change(session(source, 100.0, interrupted), session(source, 100.0 * factor, interrupted))
        assert change.verdict == verdict, change
        assert change.low <= change.relative <= change.high


def test_the_interval_holds_the_true_change() -> None:
    """The interval holds the true change in about 95 of 100 comparisons without a session offset."""
    source, held = random.Random(5), 0
    for _ in range(100):
        before, after = ([rate * source.gauss(1, 0.05) for _ in range(SAMPLES)] for rate in (100.0, 90.0))
        change = speed_change(before, after)
        held += change.low <= -0.1 <= change.high
    assert held >= 88


def test_the_undisturbed_rate_is_the_upper_quartile() -> None:
    assert [undisturbed([float(rate) for rate in range(count)]) for count in (1, 2, 5, 9, 21)] == [0, 1, 3, 6, 15]
    change = speed_change([10.0, 12.0, 11.0], [5.0, 6.0, 5.5])
    assert (change.before, change.after, change.relative) == (12.0, 6.0, -0.5) and change.low < -0.5 < change.high


def made(**changes: object) -> GoldenRecord:
    stored = GoldenRecord(
        device="CPU",
        dtype="bfloat16",
        versions={"mycli-llm": "0.1.0", "torch": "2.13.0", "numpy": "2.0"},
        files="f" * 64,
        tokens=((1, 2, 3), (4, 5)),
        logprobs="a" * 64,
        lengths={"prompt": 256, "reply": 100},
        rates={"prompt": (10.0, 11.0, 12.0), "reply": (3.0, 3.1, 3.2)},
    )
    return replace(stored, **changes)  # type: ignore[arg-type]  # the fields have several types


def test_a_record_comes_back_as_it_was_and_a_foreign_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "state" / "pico-cpu.json"
    assert GoldenRecord.read(path) is None
    stored = made(reference=(700.5, 701.25))
    stored.write(path)
    assert GoldenRecord.read(path) == stored and path.stat().st_mode & 0o777 == 0o600
    for text in ("", "{}", "[]", path.read_text().replace('"format_version": 1', '"format_version": 2')):
        path.write_text(text)
        assert GoldenRecord.read(path) is None


def test_a_version_is_new_until_it_was_compared() -> None:
    stored = made()
    same, other = "mycli-llm 0.1.0, torch 2.13.0", "mycli-llm 0.2.0, torch 2.13.0"
    assert not stored.is_new(same), "numpy computes nothing"
    assert stored.is_new(other) and not stored.with_compared(other).is_new(other)


@pytest.mark.parametrize(
    ("changes", "divergence", "same_bits"),
    [
        ({}, None, True),
        ({"logprobs": "b" * 64}, None, False),
        ({"tokens": ((1, 2, 3), (4, 6))}, (1, 1), False),
        ({"tokens": ((1, 2, 3, 9), (4, 5))}, (0, 3), False),
    ],
    ids=["same", "bits", "token", "longer"],
)
def test_the_first_difference_is_named(
    changes: dict[str, object], divergence: tuple[int, int] | None, same_bits: bool
) -> None:
    result = compare_records(made(), made(**changes))
    assert (result.divergence, result.same_bits) == (divergence, same_bits)


def test_a_busy_machine_is_no_evidence_of_speed() -> None:
    slow = made(rates={"prompt": (1.0, 1.1, 1.2), "reply": (0.3, 0.31, 0.32)})
    assert compare_records(made(), slow).slower == ["prompt", "reply"]
    for before, after in ((0.5, 0.0), (0.0, 0.5)):
        result = compare_records(made(busy=before), replace(slow, busy=after))
        assert result.busy and result.slower == []


def test_a_machine_that_became_slower_is_not_a_slower_program() -> None:
    slow = made(rates={"prompt": (1.0, 1.1, 1.2), "reply": (0.3, 0.31, 0.32)}, reference=(0.7, 0.7, 0.71))
    with_reference = made(reference=(1.0, 1.0, 1.01))
    result = compare_records(with_reference, slow)
    assert result.unclear and not result.busy and result.slower == []
    assert compare_records(with_reference, replace(slow, reference=(0.99, 1.0, 1.0))).slower == ["prompt", "reply"]
    assert compare_records(made(), slow).slower == ["prompt", "reply"]  # an older record has no reference


def test_what_is_measured_is_repeatable_and_sees_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SAMPLE_SECONDS": 0.005, "TIMED_TOKENS": 16, "REPLY_TOKENS": 6, "FEWEST_SAMPLES": 2}.items():
        monkeypatch.setattr(golden_record, name, value)
    folder = open_model_folder(PICO)
    with open_model("pico", EngineConfig(device="cpu", context=256), offline=True) as opened:
        first = record(opened, folder, seconds=0.01)
        again = record(opened, folder, first.lengths, seconds=0.01)
        result = compare_records(first, again)
        assert result.divergence is None and result.same_bits and first.lengths == again.lengths
        assert len(first.rates["reply"]) >= golden_record.FEWEST_SAMPLES and min(first.rates["prompt"]) > 0
        assert len(first.reference) == 2 * golden_record.REFERENCE_SAMPLES and min(first.reference) > 0
        assert first.tokens[0] and len(first.tokens) == len(golden_record.PROMPTS)
    with open_model("pico", EngineConfig(device="cpu", context=256, dtype="float32"), offline=True) as opened:
        assert not compare_records(first, record(opened, folder, first.lengths, seconds=0.01)).same_bits


def test_the_speed_of_a_model_with_a_short_context_is_measured_within_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SAMPLE_SECONDS": 0.005, "REPLY_TOKENS": 6, "FEWEST_SAMPLES": 2}.items():
        monkeypatch.setattr(golden_record, name, value)
    shutil.copytree(PICO, tmp_path / "short")
    config = tmp_path / "short" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 128}))
    with open_model(str(tmp_path / "short"), EngineConfig(device="cpu"), offline=True) as opened:
        lengths = record(opened, open_model_folder(tmp_path / "short"), seconds=0.01).lengths
    assert lengths["prompt"] == 126 and lengths["reply"] <= 126
