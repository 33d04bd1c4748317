"""Run the tests of `test_emulated` for some compute capabilities and store a table of counts and seconds.

PYTHONPATH=[FOLDER_OF_A_TRITON:].links python -m tests.ptx.suite docs/results/emulated.md [80 90 120] [-k WORDS]

The table is written as each test ends. Each row is for one version of Triton, one capability and one test function;
other rows stay unchanged, so that versions and capabilities can be run separately, or in parts with pytest's -k, where
a row reports the last run. Seconds are CPU time of this process, the emulator and the compilers; cached kernels are not
compiled again.
"""

import multiprocessing
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).with_name("test_emulated.py")
CAPABILITIES = ("80", "90", "120")
PAGE = """# Kernel tests on the emulator

Results of `python -m tests.ptx.suite docs/results/emulated.md`: the kernels' tests and whole fused
passes, compiled by Triton for a compute capability and run without a GPU by the
[emulator](../kernels.md#running-kernels-without-a-gpu). Seconds are processor time, compilers
included. Tests that are not in the table were not run.

| Triton | sm | test | passed | failed | seconds | made |
|---|---|---|---:|---:|---:|---|
"""


class Key(NamedTuple):
    """The key of a row."""

    triton: str
    capability: str
    test: str


@dataclass
class Row:
    """The result of one test function's cases."""

    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    made: str = ""


def rows(text: str) -> dict[Key, Row]:
    """Return the rows of a page; none if it has no table."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) == 7 and re.fullmatch(r"\d+", cells[1]):
            found[Key(*cells[:3])] = Row(int(cells[3]), int(cells[4]), float(cells[5]), cells[6])
    return found


def page(table: dict[Key, Row]) -> str:
    """Return the page with these rows and a total for each version and capability."""
    lines = []
    for run in dict.fromkeys(sorted((key.triton, int(key.capability)) for key in table)):
        own = {key: row for key, row in sorted(table.items()) if (key.triton, int(key.capability)) == run}
        lines += [_line(key, row) for key, row in own.items()]
        passed, failed = (sum(getattr(row, field) for row in own.values()) for field in ("passed", "failed"))
        seconds = sum(row.seconds for row in own.values())
        lines.append(
            f"| {run[0]} | {run[1]} | **all of these** | **{passed}** | **{failed}** | **{seconds:.0f}** | |\n"
        )
    return PAGE + "".join(lines)


def _line(key: Key, row: Row) -> str:
    counts = f"{row.passed} | {row.failed} | {row.seconds:.0f} | {row.made}"
    return f"| {key.triton} | {key.capability} | {key.test} | {counts} |\n"


def worked() -> float:
    """Return CPU seconds of this process, its running children, and the children that those have waited for."""
    here, tick = os.times(), os.sysconf("SC_CLK_TCK")
    seconds = here.user + here.system + here.children_user + here.children_system
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        seconds += sum(map(int, fields[11:15])) / tick
    return seconds


class Record:
    """The pytest plugin that selects the cases of some capabilities and writes the page of their results."""

    def __init__(self, path: Path, version: str, capabilities: Iterable[str]) -> None:
        self._path, self._version, self._capabilities = path, version, frozenset(capabilities)
        self._table = rows(path.read_text("utf-8")) if path.exists() else {}
        self._begun: set[Key] = set()
        self._worked = worked()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Select the cases of the chosen capabilities and record the capability in their properties."""
        kept = []
        for item in items:
            given = getattr(item, "callspec", None)
            played = str((given.params if given else {}).get("interpret") or (given and given.params.get("capability")))
            if played in self._capabilities:
                item.user_properties.append(("capability", played))
                kept.append(item)
        items[:] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test that has run, or whose setup failed."""
        if report.skipped or (report.when != "call" and report.passed):
            return
        name = report.nodeid.split("::")[1].split("[")[0].removeprefix("test_").replace("_", " ")
        key = Key(self._version, dict(report.user_properties)["capability"], name)
        if key not in self._begun:
            self._begun.add(key)
            self._table[key] = Row(made=datetime.now(UTC).date().isoformat())
        row = self._table[key]
        row.passed, row.failed = row.passed + report.passed, row.failed + report.failed
        now = worked()
        row.seconds, self._worked = row.seconds + now - self._worked, now
        self._path.write_text(page(self._table), "utf-8")


def _main(arguments: list[str]) -> int:
    import triton

    path, *rest = arguments
    capabilities = [one for one in rest if one.isdigit()]
    others = [one for one in rest if not one.isdigit()]
    record = Record(Path(path), triton.__version__, capabilities or CAPABILITIES)
    return pytest.main(["-q", "-n", "0", "-m", "slow or not slow", str(TESTS), *others], plugins=[record])


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
