"""Saves replies and speed of a model, and compares an updated program with them."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mycli.cli.command import Call
from mycli.cli.load import record_path
from mycli.cli.text.progress import STEP_SECONDS, stages
from mycli.runtime.errors import UsageError
from mycli.runtime.utils.files import disk_errors, require_writable

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.runtime.diagnostics.golden_record import GoldenComparison, GoldenRecord, SpeedChange
    from mycli.runtime.engine.replies.opened_model import OpenedModel


def measure(call: Call, opened: "OpenedModel", before: "GoldenRecord | None" = None) -> "GoldenRecord":
    """Measure replies and speed; without `before` for a record to be written, which needs no reader of the result."""
    from functools import partial

    from mycli.runtime.diagnostics.golden_record import SECONDS, record

    call.out.note(f"{opened.source.name}: measuring replies and speed, about {SECONDS:.0f} s")
    folder = opened.source.open()
    show_progress = call.out.progress if before is None else call.out.result_progress
    with stages(partial(show_progress, line_seconds=5 * STEP_SECONDS)) as progress:
        return record(opened, folder, None if before is None else before.lengths, seconds=SECONDS, progress=progress)


def save_record(call: Call, opened: "OpenedModel") -> dict[str, Any]:
    """Measure a model and write its record, replacing an earlier one. Returns the JSON of the record."""
    from mycli.runtime.diagnostics.golden_record import undisturbed

    path = record_path(opened)
    try:  # before measuring for 20 s
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        require_writable(path)
    except UsageError as error:  # no option names this file
        hint = f"make {path.parent} writable, or set XDG_STATE_HOME to another folder"
        raise UsageError(error.message, hint) from None
    record = measure(call, opened)
    record.write(path)
    if not call.out.json_mode:
        rows = [(name, f"{undisturbed(rates):.1f} tok/s, {len(rates)} samples") for name, rates in record.rates.items()]
        replies = f"{len(record.tokens)} replies, {sum(map(len, record.tokens))} tokens"
        call.out.card(f"saved for {opened.source.name}", [("replies", replies), *rows, ("file", str(path))])
    return {"saved": str(path), **asdict(record)}


def compare_saved(call: Call, opened: "OpenedModel") -> tuple[dict[str, Any], list[str]]:
    """Measure a model and compare it with its record. Returns the JSON of the comparison, and what got worse."""
    from mycli.runtime.diagnostics.golden_record import (
        GoldenRecord,
        compare_records,
        current_version,
        files_digest,
        version_line,
    )

    name, path = opened.source.name, record_path(opened)
    before = GoldenRecord.read(path)
    hint = f"mycli doctor {name} --save"
    if before is None:
        raise UsageError(f"nothing was saved for {name} on this device", hint)
    if before.files != files_digest(opened.source.open()):
        raise UsageError(f"{name}: its files are not those that the saved replies came from", hint)
    after = measure(call, opened, before)
    result = compare_records(before, after)
    before.with_compared(current_version()).write(path)
    if not call.out.json_mode:
        rows = [("saved with", version_line(before.versions)), ("this is", version_line(after.versions))]
        if before.device != after.device:
            rows.append(("device", f"{before.device} then, {after.device} now"))
        rows += [(kind, _speed(change, result.unclear)) for kind, change in result.speed.items()]
        call.out.card(f"{name} compared with what was saved", [*rows, ("replies", _replies(result, before))])
    if result.busy:
        call.out.warn("other programs used the CPU during a measurement, so the speeds are no evidence; repeat it")
    elif result.unclear and result.machine is not None:
        change = f"a product of torch: {result.machine.relative:+.0%}"
        call.out.warn(f"the machine's own speed changed ({change}), so the speeds are no evidence; repeat it later")
    problems = [f"{name}: {kind} is slower, {_speed(result.speed[kind])}" for kind in result.slower]
    if result.divergence is not None:
        problems.append(f"{name}: {_replies(result, before)}")
    # Changed replies count as worse although an update may improve them: which of both it is, the user decides.
    answer = {
        "saved_versions": dict(before.versions),
        "speed": {kind: {**asdict(c), "verdict": c.verdict} for kind, c in result.speed.items()},
        "busy": result.busy,
        "machine": None if result.machine is None else {**asdict(result.machine), "verdict": result.machine.verdict},
        "same_replies": result.divergence is None,
        "same_bits": result.same_bits,
    }
    return answer, problems


def _speed(change: "SpeedChange", unclear: bool = False) -> str:
    interval = f"{change.relative:+.1%}, 95%: {change.low:+.1%} to {change.high:+.1%}"
    return f"{change.before:.1f} → {change.after:.1f} tok/s: {'unclear' if unclear else change.verdict} ({interval})"


def _replies(result: "GoldenComparison", before: "GoldenRecord") -> str:
    if result.divergence is not None:
        reply, token = result.divergence
        return f"reply {reply + 1} of {len(before.tokens)} differs from token {token + 1} on"
    return "the same tokens and bits" if result.same_bits else "the same tokens; the last bits of logits differ"
