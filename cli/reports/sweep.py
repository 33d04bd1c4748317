"""`mycli quantize --sweep`: several copies of one model, compared in a table and a plot."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mycli.cli.command import Call
from mycli.cli.flags.recipe import RecipeFlags
from mycli.cli.output import Column
from mycli.cli.reports.plot import Chart, Point, write_charts
from mycli.cli.text.progress import STEP_SECONDS, duration, stages
from mycli.quant.planning.target import check_target
from mycli.quant.recipe import Recipe
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.store import RECORD, state_dir
from mycli.runtime.utils.files import write_atomic
from mycli.runtime.utils.json_fields import Fields, read_object
from mycli.runtime.utils.units import human_bytes

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.quant.planning.plan import QuantizationPlan
    from mycli.quant.shared_work import SharedWork
    from mycli.runtime.device.placement import Placement

KEYS = ("bits", "method", "group", "scales")
_MAX_RECORD = 16 << 20
_HINT = "for example: --sweep bits=4,3,2 method=rtn,gptq"


@dataclass(frozen=True)
class Copy:
    recipe: Recipe
    folder: Path


@dataclass(frozen=True)
class Options:
    overwrite: bool
    restart: bool
    plot: Path | None
    dry_run: bool


def _kl(row: dict[str, Any]) -> str | None:
    return None if row["kl"] is None else f"{row['kl']:.3g}"


_COLUMNS = (
    Column("copy", "name", priority=1),
    Column("bits per weight", lambda row: f"{row['bits_per_weight']:.2f}", right=True, priority=4),
    Column("size", lambda row: human_bytes(row["bytes"]), right=True, priority=2),
    Column("KL", _kl, right=True, priority=3),
    Column("same top token", lambda row: None if row["kl"] is None else f"{row['same_top1']:.1%}", True, 5),
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


def run_sweep(
    call: Call,
    copies: Sequence[Copy],
    plan: "Callable[[Recipe], QuantizationPlan]",
    placement: "Placement",
    options: Options,
) -> None:
    """Make the copies that do not exist, and print all. A copy that an earlier sweep finished is kept."""
    from mycli.quant import pipeline
    from mycli.quant.planning.grouping import solved_together
    from mycli.quant.planning.pace import expected_seconds
    from mycli.quant.planning.plan import check_resources, require_disk
    from mycli.quant.shared_work import SharedWork

    # Every check before the first copy: hours of work must not end in a refusal.
    shared = SharedWork(remembers=True)
    works, finished = [], []
    for copy in copies:
        work = plan(copy.recipe)
        done = not options.overwrite and _is_finished(copy, work, shared)
        finished.append(done)
        if not done:
            check_target(copy.folder, options.overwrite, work.source.folder)
            check_resources(work, copy.folder, overwrite=options.overwrite)
        works.append(work)
    unfinished = [index for index, done in enumerate(finished) if not done]
    require_disk(need for index in unfinished for need in works[index].disk_needs(copies[index].folder, None))
    if options.dry_run:
        rows = [
            _planned(copy, work, expected_seconds(work, placement)) for copy, work in zip(copies, works, strict=True)
        ]
        call.out.show({"sweep": rows}, _COLUMNS, rows="sweep")
        return
    for number, (copy, done) in enumerate(zip(copies, finished, strict=True), start=1):
        state = "finished earlier" if done else "to be quantized"
        call.out.note(f"{number} of {len(copies)}: {copy.folder.name}: {state}")
    for group in solved_together([works[index] for index in unfinished]):
        chosen = [copies[unfinished[place]] for place in group]
        call.out.note(f"quantizing {', '.join(copy.folder.name for copy in chosen)}")
        plans = [(works[unfinished[place]], copies[unfinished[place]].folder) for place in group]
        with stages(partial(call.out.progress, line_seconds=STEP_SECONDS)) as progress:
            outcomes = pipeline.quantize_copies(
                plans,
                placement,
                shared,
                overwrite=options.overwrite,
                restart=options.restart,
                progress=progress,
                note=call.out.note,
            )
            for outcome in outcomes:
                for note in outcome.notes:
                    call.out.note(f"{outcome.folder.name}: {note}")
                _remember_seconds(outcome.folder, outcome.seconds)
    rows = [_row(copy) for copy in copies]
    call.out.show({"sweep": rows}, _COLUMNS, rows="sweep")
    if options.plot is not None:
        _plot(options.plot, works[0].source.label, rows)


def _record(folder: Path) -> Fields | None:
    try:
        return read_object(folder / RECORD, _MAX_RECORD)
    except ModelError:
        return None


def _is_finished(copy: Copy, work: "QuantizationPlan", shared: "SharedWork") -> bool:
    # The folder appears by one rename when all is done, so its record is complete.
    record = _record(copy.folder)
    if record is None:
        return False
    group = "channel" if copy.recipe.group is None else copy.recipe.group
    recipe = json.loads(json.dumps({**asdict(copy.recipe), "group": group}))
    sizes = {path.name: path.stat().st_size for path in work.folder.source_files()}
    files = record.object("source").object("files")
    known = {name: files.object(name).integer("bytes", low=0, high=1 << 50) for name in files.values}
    if record.object("recipe").values != recipe or known != sizes or not record.has("card"):
        return False
    # The recipe says nothing of the user's text.
    text = record.object("calibration").values.get("sha256")
    return not copy.recipe.needs_data or text == shared.calibration(work).sha256


def _row(copy: Copy) -> dict[str, Any]:
    record = _record(copy.folder)
    assert record is not None
    size, card = record.object("size"), record.object("card").object("divergence")
    return {
        "name": copy.folder.name,
        "folder": str(copy.folder),
        "method": copy.recipe.method,
        "bits_per_weight": size.number("quantized_bits_per_weight"),
        "bytes": size.integer("bytes", high=1 << 50),
        "kl": card.object("kl").number("value") if card.has("kl") else None,
        "same_top1": card.object("same_top1").number("value") if card.has("kl") else None,
        "seconds": _known_seconds().get(str(copy.folder)),
    }


def _planned(copy: Copy, work: "QuantizationPlan", seconds: float) -> dict[str, Any]:
    size = {"bits_per_weight": work.size.quantized_bits_per_weight, "bytes": work.size.bytes}
    names = {"name": copy.folder.name, "folder": str(copy.folder), "method": copy.recipe.method}
    return {**names, **size, "kl": None, "same_top1": None, "seconds": seconds}


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
