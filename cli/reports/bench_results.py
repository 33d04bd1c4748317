"""Results of `mycli bench` and `mycli bench serve`: how they are printed, saved and compared with earlier ones."""

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mycli.cli.command import Call
from mycli.cli.flags import options
from mycli.cli.output import Column
from mycli.cli.text.format import SCHEMA_VERSION
from mycli.runtime.errors import GateError, ModelError, UsageError
from mycli.runtime.utils.files import disk_errors, read_input, require_writable, write_atomic
from mycli.runtime.utils.json_fields import Fields, parse_object

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.runtime.diagnostics.throughput import Change

Row = dict[str, Any]
FORMATS = ("md", "json", "jsonl", "csv")
_FEWEST_RUNS = 2  # of each side: one has no variance
MAX_RESULTS = 1 << 24  # bytes of a results file
KEY = ("model", "test", "device", "dtype", "kv")  # results are compared if these agree
_CHANGES = (
    Column("model", "model"),
    Column("test", "test"),
    Column("t/s before", lambda row: f"{row['before']:.2f}", right=True),
    Column("t/s now", lambda row: f"{row['tokens_per_second']:.2f}", right=True),
    Column("change", lambda row: f"{row['change'].relative:+.1%}", right=True),
    Column("95%", lambda row: _interval(row["change"]), right=True),
)

Repetitions = Annotated[int, options.option("-r --repetitions", "N", "Number of runs of each test.", min=1, max=1000)]


def _interval(change: "Change") -> str:
    return f"{change.low:+.1%} to {change.high:+.1%}" if math.isfinite(change.low) else "unknown"


@dataclass(frozen=True)
class ResultFlags:
    """How results are printed, saved and compared, as typed."""

    output: Annotated[str, options.words("-o --output", FORMATS, "Output format.")] = "md"
    save: Annotated[Path | None, options.option("--save", "FILE", "Save the results.")] = None
    compare: Annotated[Path | None, options.option("--compare", "FILE", "Compare with saved results.")] = None
    fail_on_regress: Annotated[
        str | None, options.option("--fail-on-regress", "5%", "Exit with 6 if a test is slower by more than this.")
    ] = None

    def check(self, repetitions: int) -> None:
        """Raise UserError for bad values and files, and for a gate that cannot decide, before minutes of work."""
        options.choice("-o", self.output, FORMATS)
        if self._limit() is not None and self.compare is None:
            raise UsageError("--fail-on-regress needs results to compare with", "add --compare FILE")
        if self.compare is not None:
            saved = min(map(len, read_results(self.compare).values()))
            if self._limit() is not None and min(repetitions, saved) < _FEWEST_RUNS:
                where = f"{self.compare} has {saved} of a test" if saved < _FEWEST_RUNS else f"-r is {repetitions}"
                raise UsageError(
                    f"--fail-on-regress needs {_FEWEST_RUNS} runs of each test on both sides: {where}",
                    "repeat both measurements with -r 5",
                )
        if self.save is not None:
            _check_save(self.save)

    def _limit(self) -> float | None:
        text = self.fail_on_regress
        if text is None:
            return None
        number = text.removesuffix("%")
        if not text.endswith("%") or not number.replace(".", "", 1).isdecimal():
            raise UsageError(f"--fail-on-regress {text}: not a percentage", "for example: --fail-on-regress 5%")
        return float(number) / 100

    def publish(self, call: Call, rows: Sequence[Row], columns: Sequence[Column]) -> None:
        """Print, compare and save `rows`. Raises GateError for tests slower than --fail-on-regress allows."""
        changes = [] if self.compare is None else _changes(rows, self.compare)
        for row, _, change in changes if self._style(call) != "md" else ():
            row["change"] = change.relative
            # With one run on a side nothing bounds the change, and JSON has no infinity.
            row["change_95"] = [change.low, change.high] if math.isfinite(change.low) else None
        self.print(call, rows, columns)
        if changes and self._style(call) == "md":
            call.out.table([{**row, "before": before, "change": change} for row, before, change in changes], _CHANGES)
        if any(not math.isfinite(change.low) for _, _, change in changes):
            call.out.note("one run on a side shows no spread, so a change may be chance; measure both with -r 5")
        if self.save is not None:
            text = json.dumps({"schema_version": SCHEMA_VERSION, "results": list(rows)}, indent=1) + "\n"
            with disk_errors(self.save):
                write_atomic(Path(os.path.realpath(self.save)), text.encode())
        limit = self._limit()
        slower = [
            f"{row['model']} {row['test']} {change.relative:+.1%}"
            for row, _, change in changes
            if limit is not None and change.regressed(limit)
        ]
        if slower:
            hint = f"compare with {self.compare}; other programs on this machine also make it slower"
            raise GateError("slower than before: " + ", ".join(slower), hint)

    def _style(self, call: Call) -> str:
        return "json" if call.out.json_mode else self.output

    def print(self, call: Call, rows: Sequence[Row], columns: Sequence[Column]) -> None:
        style = self._style(call)
        if style == "md":
            call.out.table(rows, columns)
        elif style == "json":
            call.out.json({"results": list(rows)})
        elif style == "jsonl":
            for row in rows:
                call.out.json_record(row)
        else:
            text = io.StringIO()
            flat = [{**row, "samples": " ".join(map(str, row["samples"]))} for row in rows]
            writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(flat)
            call.out.result(text.getvalue().rstrip("\n"))


def read_results(path: Path) -> dict[tuple[str, ...], list[float]]:
    """Read the rates of each test, by `KEY`. Raises NotFoundError, and ModelError for a file not written by --save."""
    hint = "write such a file with mycli bench MODEL --save FILE"
    try:
        saved = parse_object(read_input(path, MAX_RESULTS), path.name, MAX_RESULTS)
    except ModelError as error:
        raise ModelError(error.message, hint) from None
    results: dict[tuple[str, ...], list[float]] = {}
    for value in saved.array("results", dict):
        row = Fields(value, f"{path.name}: results")
        samples = row.array("samples", float)
        if not samples or min(samples) <= 0:
            raise row.fail("samples", "must be rates above 0", hint)
        results[tuple(row.text(key) for key in KEY)] = samples
    if not results:
        raise ModelError(f"{path.name} contains no results", hint)
    return results


def _check_save(path: Path) -> None:
    require_writable(path)
    if path.exists() and path.stat().st_size:
        try:
            read_results(path)
        except ModelError:
            message = f"--save {path}: the file contains something else and was not replaced"
            raise UsageError(message, "name another file") from None


def _changes(rows: Sequence[Row], path: Path) -> "list[tuple[Row, float, Change]]":
    from mycli.runtime.diagnostics.throughput import compare

    saved = read_results(path)
    pairs = [(row, saved[key]) for row in rows if (key := tuple(row[name] for name in KEY)) in saved]
    if not pairs:
        raise UsageError(
            f"{path.name} contains none of these tests", "compare the same models, tests, device and dtype"
        )
    return [(row, sum(before) / len(before), compare(before, row["samples"])) for row, before in pairs]
