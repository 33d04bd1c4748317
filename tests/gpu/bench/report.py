"""Run cases within a time budget; write the results as one JSON and one table after each case.

A case that fails becomes an error line; a case that no longer fits becomes a dropped line.
"""

import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
SCHEMA = 1


class NotInstalled(Exception):
    """The compared library is not installed: noted in the table, not an error."""


@dataclass(frozen=True)
class Case:
    """The description of one measurement; `seconds` is its estimated duration, used for the time budget."""

    name: str
    seconds: float
    run: Callable[[], Sequence[Row]]


@dataclass(frozen=True)
class Part:
    """The cases that share what their generator builds; `seconds` is the estimated time of building it."""

    name: str
    seconds: float
    cases: Callable[[], Iterator[Case]]


@dataclass
class Report:
    """The facts of the machine and the rows of each part; `notes` are (part, case, kind, text)."""

    facts: dict[str, Any]
    target: Path  # without suffix
    rows: dict[str, list[Row]] = field(default_factory=dict)
    notes: list[dict[str, str]] = field(default_factory=list)

    def note(self, part: str, case: str, kind: str, text: str) -> None:
        """Add a note. kind: error, dropped, or not installed."""
        self.notes.append({"part": part, "case": case, "kind": kind, "text": text})

    def as_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **self.facts, "parts": self.rows, "notes": self.notes}

    def markdown(self) -> str:
        """Return a list of facts, a table for each part, and the missing cases."""
        lines = [f"# {self.facts.get('device', 'device')}, {self.facts.get('date', '')}", ""]
        lines += [f"- {name}: {_show(value)}" for name, value in self.facts.items()]
        for part, rows in self.rows.items():
            lines += ["", f"## {part}", "", *_table(rows)]
        if self.notes:
            lines += ["", "## Missing", "", *_table(self.notes)]
        return "\n".join(lines) + "\n"

    def write(self) -> None:
        """Replace both files atomically."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        for suffix, text in ((".json", json.dumps(self.as_json(), indent=1) + "\n"), (".md", self.markdown())):
            temporary = self.target.with_name(f".{self.target.name}{suffix}")
            temporary.write_text(text)
            temporary.replace(self.target.with_name(self.target.name + suffix))


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_show(each)}" for name, each in value.items())
    text = ", ".join(map(_show, value)) if isinstance(value, list | tuple) else str(value)
    return text.replace("|", "/").replace("\n", " ")


def _table(rows: Sequence[Row]) -> list[str]:
    """Return one column for each key in order of appearance, without samples, which only the JSON has."""
    names = list(dict.fromkeys(name for row in rows for name in row if name != "samples"))
    if not names:
        return ["nothing"]
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    return lines + ["| " + " | ".join(_show(row.get(name, "")) for name in names) + " |" for row in rows]


class Budget:
    """The time limit in seconds from now; work that is estimated not to fit is not started."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Return the remaining seconds."""
        return self._end - self._clock()


def run(
    report: Report,
    parts: Sequence[Part],
    budget: Budget,
    tell: Callable[[str], None] = lambda text: None,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Run every case of every part in order and write the files after each. `between` frees memory after a part."""
    for part in parts:
        if part.seconds > budget.left:
            report.note(part.name, "all", "dropped", f"needs about {part.seconds:.0f} s, {budget.left:.0f} s left")
            report.write()
            continue
        tell(f"{part.name} ({budget.left:.0f} s left)")
        try:
            for case in part.cases():
                _one(report, part.name, case, budget, tell)
        except Exception as error:  # a part that cannot be built must not cost the others
            report.note(part.name, "all", "error", _reason(error))
        report.write()
        between()


def _one(report: Report, part: str, case: Case, budget: Budget, tell: Callable[[str], None]) -> None:
    if case.seconds > budget.left:
        report.note(part, case.name, "dropped", f"needs about {case.seconds:.0f} s, {budget.left:.0f} s left")
        return
    try:
        rows = case.run()
        report.rows.setdefault(part, []).extend(rows)
        tell("\n".join(f"  {case.name}: {_show({k: v for k, v in row.items() if k != 'samples'})}" for row in rows))
    except NotInstalled as error:
        report.note(part, case.name, "not installed", str(error))
    except Exception as error:  # record any error and continue
        report.note(part, case.name, "error", _reason(error))
        tell(f"  {case.name}: {_reason(error)}")
    report.write()


def _reason(error: Exception) -> str:
    """Return type, message and place in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"
