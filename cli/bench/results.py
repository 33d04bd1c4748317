"""Results of `mycli bench` in a file: kept with --save, read again and compared with --compare.

Knows the file and the table of changes. Does not measure.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mycli.cli.command import Call
from mycli.cli.text.json_lines import SCHEMA_VERSION
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.utils.files import disk_errors, read_input, require_writable, write_atomic
from mycli.runtime.utils.json_fields import Fields, parse_object

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.runtime.diagnostics.throughput import Change

Row = dict[str, Any]
MAX_RESULTS = 1 << 24  # bytes of a file of results
KEY = ("model", "test", "device", "dtype", "kv")  # what must agree for two results to be compared


def read_results(path: Path) -> dict[tuple[str, ...], list[float]]:
    """Samples of an earlier run by `KEY`. Raises NotFoundError, or ModelError for what was not written by --save."""
    hint = "mycli bench --save writes such a file"
    try:
        found = parse_object(read_input(path, MAX_RESULTS), path.name, MAX_RESULTS)
    except ModelError as error:
        raise ModelError(error.message, hint) from None
    results: dict[tuple[str, ...], list[float]] = {}
    for value in found.array("results", dict):
        row = Fields(value, f"{path.name}: results")
        samples = row.array("samples", float)
        if not samples or min(samples) <= 0:
            raise row.fail("samples", "must be rates above 0", hint)
        results[tuple(row.text(key) for key in KEY)] = samples
    if not results:
        raise ModelError(f"{path.name}: holds no results", hint)
    return results


def check_save(path: Path) -> None:
    """Raises UsageError where results cannot be kept, or where something else is: before minutes of work."""
    require_writable(path)
    if path.exists() and path.stat().st_size:
        try:
            read_results(path)
        except ModelError:
            message = f"--save {path}: holds something else, which is left alone"
            raise UsageError(message, "name another file") from None


def compare_results(call: Call, rows: Sequence[Row], path: Path, style: str) -> "list[tuple[Row, Change]]":
    """Show each result against the one of the same name in `path`."""
    from mycli.runtime.diagnostics.throughput import compare

    old = read_results(path)
    pairs = [(row, old[key]) for row in rows if (key := tuple(row[name] for name in KEY)) in old]
    if not pairs:
        raise UsageError(f"{path.name} has none of these tests", "compare the same models, tests, device and dtype")
    changes = [(row, compare(before, row["samples"])) for row, before in pairs]
    if style == "md":
        cells = [
            [
                row["model"],
                row["test"],
                f"{sum(before) / len(before):.2f}",
                f"{row['tokens_per_second']:.2f}",
                f"{change.relative:+.1%}",
                f"{change.low:+.1%} to {change.high:+.1%}",
            ]
            for (row, before), (_, change) in zip(pairs, changes, strict=True)
        ]
        call.out.table(["model", "test", "t/s before", "t/s now", "change", "95 %"], cells, right=(2, 3, 4, 5))
    else:
        for row, change in changes:
            row["change"] = change.relative
            # One run on a side bounds nothing, and JSON has no infinity.
            row["change_95"] = [change.low, change.high] if math.isfinite(change.low) else None
    return changes


def save_results(path: Path, rows: Sequence[Row]) -> None:
    """Keep `rows` in a file that appears whole. Raises what `disk_errors` raises."""
    kept = json.dumps({"schema_version": SCHEMA_VERSION, "results": list(rows)}, indent=1) + "\n"
    with disk_errors(path):
        write_atomic(Path(os.path.realpath(path)), kept.encode())
