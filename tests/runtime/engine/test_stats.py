"""Test counts and times of a generation against numbers worked out by hand."""

import pytest

from mycli.runtime.engine.stats import EngineStats, SpeculationStats, Timing


def test_acceptance_is_of_the_tokens_up_to_the_first_rejected_one() -> None:
    stats = SpeculationStats()
    assert (stats.acceptance_rate, stats.mean_length) == (0.0, 1.0)
    for drafted, accepted in ((4, 1), (3, 3), (2, 0)):
        stats.add(drafted, accepted)
    assert (stats.passes, stats.drafted, stats.compared, stats.accepted) == (3, 9, 2 + 3 + 1, 4)
    assert stats.acceptance_rate == pytest.approx(4 / 6) and stats.mean_length == pytest.approx(1 + 4 / 3)


def test_tokens_of_a_step_share_the_time_since_the_token_before() -> None:
    timing = Timing()
    assert (timing.first_token_seconds, timing.tokens_per_second, timing.speedup) == (0.0, 0.0, None)
    timing.add(0, 0.5)  # a chunk of the prompt
    timing.add(1, 0.5)
    assert (timing.first_token_seconds, timing.tokens_per_second) == (1.0, 0.0)
    timing.add(0, 0.25)
    timing.add(2, 0.25)
    timing.add(1, 0.25)
    assert timing.token_seconds == [1.0, 0.25, 0.25, 0.25] and timing.generated == 4
    assert timing.tokens_per_second == pytest.approx(4.0), "without the first token, which belongs to the prefill"
    assert timing.speedup is None
    timing.record = SpeculationStats(step_seconds=0.5)
    assert timing.speedup == pytest.approx(2.0)
    assert Timing(token_seconds=[1.0], record=timing.record).speedup is None


def test_usage_is_of_the_blocks_that_sequences_hold() -> None:
    assert EngineStats(1, 0, 0, 3, 12, 0, 0, {}).cache_usage == 0.25
