"""Check that planted faults are one token, change the program, and skip what no test should detect."""

from pathlib import Path

from tests.support.mutants import Fault, faults, files, room_tests, sample

SOURCE = '''"""Sums 1 + 1."""
from typing import TYPE_CHECKING, Protocol

LIMIT: int = 3


class Shape(Protocol):
    def size(self) -> int:
        return 1 + 1


def total(values: "list[int] | None", start: int = 0) -> int:
    """Add 2 < 3."""
    assert start >= 0
    if values is None or not values:
        raise ValueError(f"{start + 1} and " + "nothing")
    if TYPE_CHECKING and LIMIT > 4:
        return 5
    return max(start, -sum(values)) if min(values) < LIMIT else -start
'''


def test_each_kind_of_fault_is_found_where_it_counts(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    found = [(fault.line, fault.old, fault.new) for fault in faults("a.py", tmp_path)]
    assert sorted(found) == [
        (4, "3", "4"),
        (12, "0", "1"),
        (15, "is", "is not"),
        (15, "not ", ""),
        (15, "or", "and"),
        (19, "-", ""),
        (19, "-", ""),
        (19, "<", "<="),
        (19, "max", "min"),
        (19, "min", "max"),
    ]


def test_a_fault_changes_one_place_of_one_line() -> None:
    fault = Fault("a.py", 2, 7, "<", "<=")
    assert fault.applied("é = 1\nx = é < 2\n") == "é = 1\nx = é <= 2\n"


def test_a_sample_is_repeatable_and_has_tests() -> None:
    first, again = (sample(["runtime/tokenizer/parsing"], 5, seed=1) for _ in range(2))
    assert first == again and len({(fault.path, fault.line) for fault in first}) == 5
    for fault in first:
        near, far = room_tests(fault.path)
        assert near or far
    assert sum(1 for _ in files([])) > 200
