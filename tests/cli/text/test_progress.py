"""The words of progress: durations, lines with what is left, and other work on the machine."""

from collections.abc import Callable

import pytest

from mycli.cli.text import progress
from mycli.cli.text.progress import CpuContention, Lines, duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.04 s"),
        (9.94, "9.9 s"),
        (9.95, "10 s"),
        (99, "99 s"),
        (100, "2 min"),
        (5999, "100 min"),
        (6000, "1.7 h"),
        (12600, "3.5 h"),
    ],
)
def test_durations_have_the_unit_of_their_size(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that moves the clock on by some seconds."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_bytes_are_a_share_with_their_rate(clock: Callable[[float], None]) -> None:
    lines: list[str] = []
    shown = Lines(lines.append, "pulling", 40 << 20, "B", seconds=5)
    clock(4.9)
    shown.advance(5 << 20)
    clock(5.1)
    shown.advance(5 << 20)
    clock(5)
    shown.advance(35 << 20)  # a file that was fetched again counts twice
    assert lines == [
        "pulling: 25% of 40 MiB, 1 MiB/s, 30 s left",
        "pulling: 112% of 40 MiB, 3 MiB/s, 0 s left",
    ]


@pytest.mark.parametrize(("total", "amount"), [(0, 1), (8, 0), (8, -1)], ids=["no-total", "nothing", "less"])
def test_no_line_without_something_done_of_something(
    total: float, amount: float, clock: Callable[[float], None]
) -> None:
    lines: list[str] = []
    shown = Lines(lines.append, "layers", total, "layers", seconds=5)
    clock(5)
    shown.advance(amount)
    assert lines == []


@pytest.mark.parametrize(
    ("seconds", "waited", "note"),
    [
        (10, 5.0, "busy machine: other programs used 0.5 s of CPU time per second"),
        (10, 3.0, ""),
        (0.9, 0.9, ""),
        (1, 0.5, "busy machine: other programs used 0.5 s of CPU time per second"),
        (10, None, ""),
    ],
    ids=["busy", "at-the-limit", "short", "just-long-enough", "unknown"],
)
def test_other_work_is_named_if_it_takes_much(
    seconds: float,
    waited: float | None,
    note: str,
    clock: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = iter((7.0, None if waited is None else 7.0 + waited))
    monkeypatch.setattr(progress, "cpu_wait_seconds", lambda: next(waits))
    contention = CpuContention()
    clock(seconds)
    assert contention.note() == note
