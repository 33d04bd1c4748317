"""`mycli choose`: the copy of a model that loses least and fits a memory."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import LoadFlags
from mycli.cli.load import open_config
from mycli.cli.output import Column
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.probe import Target, find_target
from mycli.runtime.engine.loading.sizing import requested_plan
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub import store
from mycli.runtime.hub.store import RECORD, state_dir
from mycli.runtime.memory import estimate as memory
from mycli.runtime.memory.fit import schemes, shortage
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.open import check_context
from mycli.runtime.utils.json_fields import Fields, read_object
from mycli.runtime.utils.units import human_bytes

EXAMPLES = (
    "mycli choose pico --gpu 24GiB --ctx 2k",
    "mycli choose pico --gpu 895MiB --json",
    "mycli choose Qwen/Qwen3-8B --gpu 24GiB --ctx 32k  # needs the network",
)
# Mean KL of GPTQ on pico in groups of 128 (docs/quality.md). Other models lose other amounts, in the same order.
STATED_KL = {8: 6.8e-5, 4: 0.0139, 3: 0.0483, 2: 0.1975}
_SPARE = 0.03  # by which an estimate may be too low
_MAX_RECORD = 16 << 20


@dataclass(frozen=True)
class Candidate:
    """`kl`: mean, `measured` when the copy was made or stated for its bits, None if it was never measured."""

    name: str
    plan: MemoryPlan
    kl: float | None
    measured: bool
    command: str = ""  # that makes it; "" for a model that is here


def _source(row: dict[str, Any]) -> str:
    return "not measured" if row["kl"] is None else "measured" if row["measured"] else "as for pico"


_COLUMNS = (
    Column("model", "name", priority=1),
    Column("state", lambda row: "can be made" if row["command"] else "here", priority=4),
    Column("memory", lambda row: human_bytes(row["memory_bytes"]), right=True, priority=2),
    Column("fits", lambda row: "yes" if row["fits"] else "no", priority=3),
    Column("KL", lambda row: "unknown" if row["kl"] is None else f"{row['kl']:.2g}", right=True, priority=5),
    Column("source of KL", _source, priority=6),
)


def _short_name(model: str) -> str:
    return Path(model.partition("@")[0]).name


def _copies(model: str, plan: MemoryPlan) -> list[Candidate]:
    # The copies of `model` that were quantized here; with an adapter merged it is another model.
    copies = []
    label = _short_name(model)
    for name in store.model_folders():
        path = store.data_dir() / "models" / name
        try:
            record = read_object(path / RECORD, _MAX_RECORD)
            source = record.object("source")
            if source.text("name").rpartition("/")[2] != label or source.has("adapter"):
                continue
            folder = open_model_folder(path)
            kl = _measured_kl(record)
        except ModelError:  # damaged, or not written by quantize: `list` says so
            continue
        # The record names its source by name only; a model of the same name and another size is another model.
        if folder.config.parameters() == plan.config.parameters():
            copy = replace(plan, config=folder.config, packings=folder.packings)
            copies.append(Candidate(name, copy, kl, kl is not None))
    return copies


def _measured_kl(record: Fields) -> float | None:
    divergence = record.object("card").object("divergence")
    return divergence.object("kl").number("value") if divergence.has("kl") else None


def _proposals(model: str, plan: MemoryPlan) -> list[Candidate]:
    if plan.packings:
        return []
    name = _short_name(model)
    proposals = []
    for scheme in schemes(plan.config):
        if scheme.packing is not None:
            bits, group = scheme.packing.bits, scheme.packing.group_size or "channel"
            line = f"mycli quantize {shlex.quote(model)} --bits {bits} --group {group}"
            packed = replace(plan, packings=scheme.packings(plan.config))
            proposals.append(Candidate(f"{name}-gptq-{scheme.packing.name}", packed, STATED_KL[bits], False, line))
    return proposals


@command
def choose(
    call: Call,
    model: options.Model,
    gpu: Annotated[int | None, options.size("--gpu", "Choose for a GPU with this much free memory.")] = None,
    batch: Annotated[int, options.option("--batch", "N", "Number of concurrent sequences.", min=1)] = 1,
    max_kl: Annotated[
        float | None, options.option("--max-kl", "X", "Leave out what loses more than this, or is unknown.", min=0)
    ] = None,
    ctx: options.Context = None,
    kv: options.CacheKind = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Choose the copy of a model that loses least and fits.

    Compares the model, its copies on this machine with the loss measured when they were made, and copies that quantize
    would make with the loss stated for their bits. Prints the command to use, or to make and use, the best that fits.
    """
    engine = LoadFlags(device=device, kv=kv, context=ctx).resolve(batch)
    folder = open_config(call, model)
    check_context(folder, engine.context)
    target = Target("gpu", "as given", True, gpu) if gpu else find_target(engine.device, state_dir())
    plan = requested_plan(folder, engine, gpu=target.gpu)
    copies = _copies(model, plan)
    names = {copy.name for copy in copies}
    proposals = [proposal for proposal in _proposals(model, plan) if proposal.name not in names]
    candidates = [Candidate(model, plan, 0.0, True), *copies, *proposals]
    free = int(target.free / (1 + _SPARE))
    rows = [_row(candidate, free) for candidate in candidates]
    fitting = [
        (candidate.kl, row["memory_bytes"], candidate)
        for candidate, row in zip(candidates, rows, strict=True)
        if row["fits"] and candidate.kl is not None and (max_kl is None or candidate.kl <= max_kl)
    ]
    if not fitting:
        smallest = min(candidates, key=lambda candidate: memory.estimate(candidate.plan).total)
        call.out.show({"model": model, "candidates": rows, "commands": []}, _COLUMNS, rows="candidates")
        if max_kl is not None and any(row["fits"] for row in rows):
            raise UsageError(f"nothing that fits has a KL of at most --max-kl {max_kl:g}", "allow more, or more memory")
        raise shortage(smallest.plan, free, target.place)
    # Of equal losses the smaller: what it leaves free becomes context.
    best = min(fitting, key=lambda entry: entry[:2])[2]
    commands = [best.command] if best.command else []
    commands.append(f"mycli chat {shlex.quote(best.name)} --ctx {plan.context}")
    answer = {"model": model, "best": best.name, "candidates": rows, "commands": commands}
    call.out.show(answer, _COLUMNS, rows="candidates")
    if not call.out.json_mode:
        call.out.result("\n".join(commands))
        if best.command:
            call.out.note("its KL is that of pico; quantize measures its own")


def _row(candidate: Candidate, free: int) -> dict[str, Any]:
    total = memory.estimate(candidate.plan).total
    return {
        "name": candidate.name,
        "memory_bytes": total,
        "fits": total <= free,
        "kl": candidate.kl,
        "measured": candidate.measured,
        "command": candidate.command or None,
    }
