"""Test the statistics behind `spec verify` and `bench draft`, from counts and times that are known."""

import math
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats

from mycli.runtime.diagnostics import speculation_check
from mycli.runtime.diagnostics.speculation_benchmark import SpeculationResult, measure_speculation
from mycli.runtime.diagnostics.speculation_check import ChiSquared, _pearson, greedy_divergences
from mycli.runtime.engine.stats import SpeculationStats, Timing

Pairs = dict[tuple[int, int], int]


def test_the_statistic_is_pearsons() -> None:
    chances = {(0, 0): 0.5, (0, 1): 0.3, (1, 0): 0.2}
    counts: Pairs = {(0, 0): 40, (0, 1): 38, (1, 0): 22}
    result = _pearson(counts, chances, 100)
    exact = stats.chisquare([40, 38, 22], [50, 30, 20])
    assert (result.draws, result.freedom) == (100, 2)
    assert result.statistic == pytest.approx(exact.statistic) and result.p_value == pytest.approx(exact.pvalue)


@pytest.mark.parametrize(
    ("chances", "cells"),
    [
        ([0.85, 0.05, 0.05, 0.05], 4),
        ([0.86, 0.05, 0.049, 0.041], 3),
        ([0.9, 0.05, 0.03, 0.02], 3),
        ([0.905, 0.05, 0.0249, 0.0201], 2),
    ],
    ids=["frequent", "two-rare", "rare-just-enough", "too-rare"],
)
def test_cells_with_fewer_than_five_expected_samples_are_merged(chances: list[float], cells: int) -> None:
    expected = {(0, token): chance for token, chance in enumerate(chances)}
    counts: Pairs = {(0, 0): 80, (0, 1): 9, (0, 2): 6, (0, 3): 5}
    frequent = sum(chance * 100 >= 5 for chance in chances)
    found, wanted = [80, 9, 6, 5], [100 * chance for chance in chances]
    merged = [*zip(found[:frequent], wanted[:frequent], strict=True)]
    merged += [(sum(found[frequent:]), sum(wanted[frequent:]))] if cells > frequent else []
    result = _pearson(counts, expected, 100)
    assert result.freedom == cells - 1 == len(merged) - 1
    assert result.statistic == pytest.approx(sum((one - chance) ** 2 / chance for one, chance in merged))


def test_a_pair_that_cannot_be_drawn_is_no_chance() -> None:
    result = _pearson({(0, 0): 99, (7, 7): 1}, {(0, 0): 1.0}, 100)
    assert result == ChiSquared(100, math.inf, 1) and result.p_value == 0
    assert _pearson({(0, 0): 100}, {(0, 0): 1.0}, 100) == ChiSquared(100, 0.0, 1)


class Subject:
    """Replies with known times: without a draft 0.5 s per token, with one 0.2 s; each prompt is computed in 9 s."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []
        self._numbers = count()

    def lengths(self) -> tuple[int, ...]:
        return (4,)

    def engine(self, policy: Any = None) -> Any:
        number = next(self._numbers)
        if policy is not None:
            policy(SimpleNamespace(relative_cost=0.1))
        return SimpleNamespace(drafts=policy is not None, forget=lambda: self.forgotten.append(number))

    def reply(self, engine: Any, prompt: list[int], limit: int) -> tuple[list[int], Timing]:
        record = SpeculationStats(passes=4, drafted=10, compared=8, accepted=6) if engine.drafts else None
        return [1] * limit, Timing(len(prompt), 0, [9.0] + [0.2 if engine.drafts else 0.5] * (limit - 1), record)


def test_the_speed_of_decoding_is_without_that_of_prompts() -> None:
    subject: Any = Subject()
    result: SpeculationResult = measure_speculation(subject, [[1], [2, 3]], limit=11, repetitions=2, lengths=(4,))
    assert (result.plain, result.drafted) == (pytest.approx(2), pytest.approx(5))
    assert result.speedup == pytest.approx(2.5)
    assert subject.forgotten == [0, 1] * 4, "in turn, each without what the one before it cached"
    record = result.record
    assert (record.passes, record.drafted, record.compared, record.accepted) == (16, 40, 32, 24)
    (row,) = result.lengths
    assert (row.drafted, row.acceptance, row.found) == (4, 0.75, 2.5)
    # 2.5 draft tokens per pass: halfway between the expectations for 2 and for 3, 1 + a + a^2 (+ a^3).
    assert row.expected == pytest.approx(1 + 0.75 + 0.75**2 + 0.75**3 / 2)


class _Diverging(Subject):
    replies: tuple[list[int], list[int]] = ([1, 2, 3], [1, 2, 3])
    context, vocabulary_size = 64, 2

    def reply(self, engine: Any, prompt: list[int], limit: int) -> tuple[list[int], Timing]:
        return self.replies[engine.drafts], Timing()


@pytest.mark.parametrize(
    ("drafted", "lead", "position", "tie"),
    [
        ([1, 2, 3], 0.0, None, False),
        ([1, 5, 3], 4 * 8 * 2.0**-7, 1, True),
        ([1, 5, 3], 4 * 9 * 2.0**-7, 1, False),
        ([1, 2], 1.0, 2, False),
        ([1, 2, 3, 4], 1.0, 3, False),
    ],
    ids=["same", "tie", "lead", "shorter", "longer"],
)
def test_a_difference_is_a_tie_within_eight_roundings(
    drafted: list[int], lead: float, position: int | None, tie: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes: list[list[int]] = []

    def logits(self: Any, tokens: list[int]) -> torch.Tensor:
        prefixes.append(tokens)
        return torch.tensor([4.0 - lead, 4.0, 99.0])  # the last is beyond the vocabulary

    fake = type("Fake", (), {"__init__": lambda *_: None, "logits": logits})
    monkeypatch.setattr(speculation_check, "PrefixLogits", fake)
    subject: Any = _Diverging()
    subject.replies = ([1, 2, 3], drafted)
    subject.runner = SimpleNamespace(dtype=torch.bfloat16)
    (found,) = greedy_divergences(subject, [[7, 8]], 9, 4)
    if position is None:
        assert found is None and prefixes == []
        return
    assert found is not None and (found.prompt, found.position, found.tie) == (0, position, tie)
    assert found.margin == pytest.approx(lead) and prefixes == [[7, 8, *[1, 2, 3][:position]]]
