"""`mycli quantize --sweep`: several copies of one model, compared in a table and a plot."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mycli.cli.command import Call
from mycli.cli.flags.recipe import RecipeFlags
from mycli.cli.output import Column
from mycli.cli.quantizing.request import QuantizationRequest, noting_stop, quantization_progress
from mycli.cli.quantizing.to_folder import target_folder
from mycli.cli.reports.plot import Chart, Point, write_charts
from mycli.cli.text.progress import duration
from mycli.quant.planning.target import OutputTarget
from mycli.quant.progress import Callbacks
from mycli.quant.recipe import Recipe
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.store import RECORD, state_dir
from mycli.runtime.utils.files import write_atomic
from mycli.runtime.utils.json_fields import Fields, read_object
from mycli.runtime.utils.units import human_bytes, percent

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.quant.planning.plan import QuantizationPlan
    from mycli.quant.shared_work import SharedWork
    from mycli.runtime.device.placement import Placement

KEYS = ("bits", "method", "group", "scales")
_MAX_RECORD = 16 << 20
_HINT = "for example: --sweep bits=4,3,2 method=rtn,gptq"


@dataclass(frozen=True)
class _Copy:
    work: "QuantizationPlan"
    target: OutputTarget
    finished: bool  # by an earlier sweep

    @property
    def folder(self) -> Path:
        return self.target.path


def _kl(row: dict[str, Any]) -> str | None:
    return None if row["kl"] is None else f"{row['kl']:.3g}"


_COLUMNS = (
    Column("copy", "name", priority=1),
    Column("bits per weight", lambda row: f"{row['bits_per_weight']:.2f}", right=True, priority=4),
    Column("size", lambda row: human_bytes(row["bytes"]), right=True, priority=2),
    Column("KL", _kl, right=True, priority=3),
    Column("same top token", lambda row: None if row["kl"] is None else percent(row["same_top1"], 1), True, 5),
    Column("time", lambda row: None if row["seconds"] is None else duration(row["seconds"]), right=True, priority=6),
)


def sweep_recipes(flags: RecipeFlags, texts: Sequence[str]) -> list[Recipe]:
    """Return the recipe of each combination of `key=value,value` words. Raises UsageError."""
    choices: dict[str, list[str]] = {}
    for word in " ".join(texts).split():
        key, _, values = word.partition("=")
        if key not in KEYS or not values or key in choices:
            raise UsageError(f"--sweep {word}: not one of {', '.join(KEYS)} with values, once each", _HINT)
        choices[key] = values.split(",")
    recipes = []
    for combination in product(*choices.values()):
        changes: dict[str, Any] = dict(zip(choices, combination, strict=True))
        if not changes.get("bits", "4").isdecimal():
            raise UsageError(f"--sweep bits={changes['bits']}: not a number of bits", _HINT)
        recipes.append(replace(flags, **changes).resolve())
    if len({recipe.name for recipe in recipes}) < len(recipes):
        raise UsageError("--sweep names a combination twice", _HINT)
    return recipes


def run_sweep(call: Call, request: QuantizationRequest, recipes: Sequence[Recipe]) -> None:
    """Make the copies that do not exist, and print all. A copy that an earlier sweep finished is kept."""
    report = request.settings.report
    if request.gates.measured or recipes[0].target_bpw is not None or request.work_dir or report == "none":
        excluded = "--max-kl, --max-call-loss, --target-bpw, --work-dir and --report none"
        raise UsageError(f"--sweep excludes {excluded}", "omit them")
    from mycli.quant.planning.pace import expected_seconds
    from mycli.quant.planning.plan import plan_quantization
    from mycli.quant.shared_work import SharedWork

    placement, shared = request.place(), SharedWork(remembers=True)
    settings = request.plan_settings(call, placement, fetch=not request.dry_run)
    copies = []
    for recipe in recipes:
        work = plan_quantization(request.source, recipe, settings, request.folder)
        target = _target(request, recipe)
        copies.append(_Copy(work, target, not target.overwrite and _is_finished(target.path, work, placement, shared)))
    _check_places(copies)
    if request.dry_run:
        rows = [_planned(copy, expected_seconds(copy.work, placement)) for copy in copies]
        call.out.show({"sweep": rows}, _COLUMNS, rows="sweep")
        return
    for number, copy in enumerate(copies, start=1):
        state = "finished earlier" if copy.finished else "to be quantized"
        call.out.note(f"{number} of {len(copies)}: {copy.folder.name}: {state}")
    _make(call, [copy for copy in copies if not copy.finished], placement, shared)
    rows = [_row(copy) for copy in copies]
    call.out.show({"sweep": rows}, _COLUMNS, rows="sweep")
    if request.plot is not None:
        _plot(request.plot, request.source.label, rows)


def _target(request: QuantizationRequest, recipe: Recipe) -> OutputTarget:
    return request.target(target_folder(request, recipe) if request.output is None else request.output / recipe.name)


def _check_places(copies: Sequence[_Copy]) -> None:
    # Every check before the first copy: hours of work must not end in a refusal.
    from mycli.quant.planning.grouping import disk_of_groups, solved_together
    from mycli.quant.planning.plan import check_resources, require_disk

    unfinished = [copy for copy in copies if not copy.finished]
    for copy in unfinished:
        check_resources(copy.work, copy.target)
    groups = solved_together([copy.work for copy in unfinished])
    tasks = [(copy.work, copy.target) for copy in unfinished]
    require_disk(disk_of_groups([tasks[index] for index in group] for group in groups))


def _make(call: Call, copies: Sequence[_Copy], placement: "Placement", shared: "SharedWork") -> None:
    from mycli.quant.pipeline import quantize_copies
    from mycli.quant.planning.grouping import solved_together

    for group in solved_together([copy.work for copy in copies]):
        chosen = [copies[index] for index in group]
        call.out.note(f"quantizing {', '.join(copy.folder.name for copy in chosen)}")
        with noting_stop(call, lambda: "to continue"), quantization_progress(call) as progress:
            tasks = [(copy.work, copy.target) for copy in chosen]
            for outcome in quantize_copies(tasks, placement, shared, Callbacks(progress, call.out.note)):
                for note in outcome.notes:
                    call.out.note(f"{outcome.folder.name}: {note}")
                _remember_seconds(outcome.folder, outcome.seconds)


def _record(folder: Path) -> Fields | None:
    try:
        return read_object(folder / RECORD, _MAX_RECORD)
    except ModelError:
        return None


def _is_finished(folder: Path, work: "QuantizationPlan", placement: "Placement", shared: "SharedWork") -> bool:
    from mycli.quant.quality_report import report_text

    # The folder appears by one rename when all is done, so its record is complete.
    record = _record(folder)
    if record is None:
        return False
    recipe = json.loads(json.dumps(work.recipe.record))
    if record.object("recipe").values != recipe or not record.has("card"):
        return False
    if _measured_tokens(record) < report_text(work.folder, work.settings.report, placement).windows.numel():
        return False
    # The recipe says nothing of the user's text.
    text = record.object("calibration").values.get("sha256")
    if work.recipe.needs_data and text != shared.calibration(work).sha256:
        return False
    # Last, because it reads the whole source: another training of the model has files of the same sizes.
    with shared.digests(work.folder) as digests:
        return record.object("source").object("files").values == digests.result()


def _measured_tokens(record: Fields) -> int:
    card = record.object("card")
    return card.integer("windows") * card.integer("context")


def _row(copy: _Copy) -> dict[str, Any]:
    record = _record(copy.folder)
    assert record is not None
    size, card = record.object("size"), record.object("card").object("divergence")
    return {
        **_names(copy),
        "bits_per_weight": size.number("quantized_bits_per_weight"),
        "bytes": size.integer("bytes", high=1 << 50),
        "kl": card.object("kl").number("value") if card.has("kl") else None,
        "same_top1": card.object("same_top1").number("value") if card.has("kl") else None,
        "seconds": _known_seconds().get(str(copy.folder)),
    }


def _planned(copy: _Copy, seconds: float) -> dict[str, Any]:
    size = {"bits_per_weight": copy.work.size.quantized_bits_per_weight, "bytes": copy.work.size.bytes}
    return {**_names(copy), **size, "kl": None, "same_top1": None, "seconds": seconds}


def _names(copy: _Copy) -> dict[str, str]:
    return {"name": copy.folder.name, "folder": str(copy.folder), "method": copy.work.recipe.method}


# mycli.json names no time, so that the same recipe gives the same bytes.
def _times() -> Path:
    return state_dir() / "sweeps.json"


def _known_seconds() -> dict[str, float]:
    try:
        values = read_object(_times(), _MAX_RECORD).values
    except ModelError:
        return {}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _remember_seconds(folder: Path, seconds: float) -> None:
    with suppress(OSError):
        _times().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = json.dumps({**_known_seconds(), str(folder): round(seconds, 1)}, indent=1)
        write_atomic(_times(), text.encode(), private=True)


def _plot(path: Path, model: str, rows: Sequence[dict[str, Any]]) -> None:
    measured = [row for row in rows if row["kl"] is not None]
    if not measured:
        raise UsageError(f"{path}: nothing was measured", "omit --report none")
    sizes = [Point(row["name"], row["bytes"] / (1 << 20), row["kl"], row["method"]) for row in measured]
    times = [Point(row["name"], row["seconds"], row["kl"], row["method"]) for row in measured if row["seconds"]]
    charts = [Chart(f"{model}: copies by size", "size in MiB", "mean KL divergence", sizes)]
    if times:
        charts.append(Chart(f"{model}: copies by time", "seconds to make", "mean KL divergence", times))
    write_charts(path, charts)
