"""The table of emulated tests: which tests run, what is counted, and which rows of a page stay."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ptx import suite


def item(**params: int) -> SimpleNamespace:
    return SimpleNamespace(callspec=SimpleNamespace(params=params), user_properties=[])


def report(test: str, capability: str, outcome: str, when: str = "call") -> SimpleNamespace:
    state = {name: name == outcome for name in ("passed", "failed", "skipped")}
    properties = [("capability", capability)]
    return SimpleNamespace(nodeid=f"file.py::{test}[case]", user_properties=properties, when=when, **state)


def test_counts_by_version_capability_and_test(tmp_path: Path) -> None:
    """A failure of the setup counts, a setup that passes does not; rows of other runs stay."""
    path = tmp_path / "page.md"
    before = suite.Key("3.6.0", "90", "attend")
    path.write_text(suite.page({before: suite.Row(7, 1, 12.0, "2026-01-02")}), "utf-8")
    record = suite.Record(path, "3.7.1", ["80", "120"])
    given = [
        ("test_attend", "80", "passed", "setup"),
        ("test_attend", "80", "passed"),
        ("test_attend", "120", "failed"),
    ]
    for one in (*given, ("test_attend", "80", "failed", "setup"), ("test_add", "80", "skipped")):
        record.pytest_runtest_logreport(report(*one))  # type: ignore[arg-type]  # the attributes that it reads
    found = suite.rows(path.read_text("utf-8"))
    assert found[before] == suite.Row(7, 1, 12.0, "2026-01-02")
    counts = {(key.triton, key.capability, key.test): (row.passed, row.failed) for key, row in found.items()}
    del counts[before]
    assert counts == {("3.7.1", "80", "attend"): (1, 1), ("3.7.1", "120", "attend"): (0, 1)}
    assert "| 3.7.1 | 80 | **all of these** | **1** | **1** |" in path.read_text("utf-8")


def test_runs_what_plays_the_capabilities(tmp_path: Path) -> None:
    items = [item(interpret=80), item(interpret=90), item(capability=120, case=1), item(case=2), SimpleNamespace()]
    record = suite.Record(tmp_path / "page.md", "3.7.1", ["80", "120"])
    record.pytest_collection_modifyitems(None, items)  # type: ignore[arg-type]  # as above
    assert [one.user_properties for one in items] == [[("capability", "80")], [("capability", "120")]]


def test_says_what_processors_have_worked() -> None:
    before = suite.worked()
    sum(range(3_000_000))
    assert suite.worked() > before


@pytest.mark.parametrize("line", ["", "| Triton | sm | test | passed | failed | seconds | made |", "| 1 | x | y |"])
def test_no_row_is_no_row(line: str) -> None:
    assert suite.rows(line) == {}
