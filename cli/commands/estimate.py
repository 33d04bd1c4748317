"""`mycli estimate`: how much memory a model takes, whether it fits, and how fast it could decode at best."""

import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mycli.cli.command import Call, command
from mycli.cli.estimate_card import EstimateSubject, estimate_json, estimate_rows, obstacle_lines
from mycli.cli.flags import options
from mycli.cli.flags.records import LoadFlags
from mycli.cli.load import adapted, announce_placement, open_config
from mycli.cli.text.format import active
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.disk import ASSUMED, read_rate
from mycli.runtime.device.probe import Target, find_target
from mycli.runtime.engine.config import MTP, NGRAM, EngineConfig
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.store import state_dir
from mycli.runtime.memory import estimate as memory
from mycli.runtime.memory.fit import PackingScheme, fit, schemes, shortage
from mycli.runtime.memory.plan import DEFAULT_CONTEXT, MemoryPlan
from mycli.runtime.memory.resident import with_fitting_experts
from mycli.runtime.open import check_context, mtp_head
from mycli.runtime.quantization.scheme import Packing, parse_packing
from mycli.runtime.utils.units import human_bytes

EXAMPLES = (
    "mycli estimate pico",
    "mycli estimate pico --quant int4-g128 --ctx 2k",
    "mycli estimate pico --table",
    "mycli estimate pico --gpu 24GiB --fit",
    "mycli estimate pico --quant int4-g128 --tp 2 --json",
    "mycli estimate pico --verify --device cpu --tol 10%",
)
HEADS = {"keep": None, "int8": 8, "int4": 4}
CONTEXTS = (2048, 8192, 32768, 131072)  # columns of --table, as far as the model goes


def _streamed(subject: EstimateSubject, engine: EngineConfig) -> EstimateSubject:
    """`subject` with the experts in memory that fit, or that are allowed, where that is not all of them."""
    found = with_fitting_experts(subject.plan, subject.target.free, engine.expert_bytes)
    if found.expert_slots is None:
        return subject
    measured = None
    with suppress(ModelError):  # where there are no weights yet, there is nothing to read
        files = () if subject.folder.config_only else subject.folder.manifest.files.values()
        measured = read_rate(max(files, key=lambda file: file.size).path) if files else None
    disk = (ASSUMED, "assumed") if measured is None else (measured, "measured")
    return replace(subject, plan=found, disk=disk)


def _card(call: Call, subject: EstimateSubject) -> None:
    config = subject.plan.config
    parameters = f"{config.parameters():,} parameters{active(config)}"
    call.out.card(f"{subject.model} · {subject.scheme} · {parameters}", estimate_rows(subject))


def _show(call: Call, subject: EstimateSubject, ranks: int | None) -> None:
    if not call.out.answered(estimate_json(subject, ranks)):
        _card(call, subject)
        if ranks is not None:
            lines = obstacle_lines(subject, ranks)
            answer = f"tensor parallel over {ranks} GPUs (vLLM, SGLang with Marlin): " + ("no" if lines else "yes")
            each = [] if lines else [f"on each GPU about {human_bytes(memory.rank_bytes(subject.plan, ranks))}"]
            call.out.result("\n".join([answer, *(f"  {line}" for line in (*lines, *each))]))
    split = ranks is not None and memory.rank_bytes(subject.plan, ranks) <= subject.target.free
    if memory.estimate(subject.plan).total > subject.target.free and not split:
        raise shortage(subject.plan, subject.target.free, subject.target.place)


def _table(call: Call, subject: EstimateSubject) -> None:
    plan, free = subject.plan, subject.target.free
    limit = plan.config.max_context
    contexts = sorted({*(c for c in CONTEXTS if c <= limit), min(limit, CONTEXTS[-1]), plan.context})
    if plan.packings:
        choices = [(subject.scheme, plan)]
    else:
        choices = [(s.name(plan.config), replace(plan, packings=s.packings(plan.config))) for s in schemes(plan.config)]
    rows = [(name, [memory.estimate(replace(one, context=c)).total for c in contexts]) for name, one in choices]
    table = [
        {"scheme": name, "context": context, "total_bytes": total, "fits": total <= free}
        for name, totals in rows
        for context, total in zip(contexts, totals, strict=True)
    ]
    if call.out.answered({"model": subject.model, "free_bytes": free, "table": table}):
        return
    cells = [
        [name, *(human_bytes(total) + ("" if total <= free else " !") for total in totals)] for name, totals in rows
    ]
    call.out.table(["scheme", *map(str, contexts)], cells, right=range(1, len(contexts) + 1))
    call.out.note(f"! is more than the {human_bytes(free)} free on {subject.target.place}")


def _fit(call: Call, subject: EstimateSubject, context: int | None, tolerance: float) -> None:
    """Within what is free even where the estimate is off by as much as --verify tolerates."""
    plan, free = subject.plan, int(subject.target.free / (1 + tolerance))
    fixed = subject.folder.packings or subject.wish != PackingScheme()
    found = fit(plan, free, context, [subject.wish] if fixed else schemes(plan.config))
    if found is None:
        raise shortage(plan, free, subject.target.place).with_message(
            f"{subject.model}: no choice fits into {human_bytes(subject.target.free)} with {tolerance:.0%} to spare"
        )
    plan, scheme = found
    name, commands = subject.model, []
    if scheme.packing is not None:
        name = f"{Path(subject.model.partition('@')[0]).name}-{scheme.packing.name}"
        group = scheme.packing.group_size or "channel"
        head = f" --head int{scheme.head.bits}" if scheme.head else ""
        integers = scheme.packing.codes == "int"
        made = f"--bits {scheme.packing.bits}" if integers else f"--method {scheme.packing.codes}"
        widths = f"{made} --group {group}{head}"
        commands.append(f"mycli quantize {shlex.quote(subject.model)} {widths} -o {shlex.quote(name)}")
    commands.append(f"mycli chat {shlex.quote(name)} --ctx {plan.context}")
    fitted = replace(subject, plan=plan)
    if call.out.answered({**estimate_json(fitted, None), "commands": commands}):
        return
    _card(call, fitted)
    call.out.result("\n".join(commands))


def _verify(call: Call, subject: EstimateSubject, engine: EngineConfig, tolerance: float) -> None:
    from mycli.runtime.diagnostics.memory_check import check_parts, measure_memory

    placement = engine.place(subject.folder.config)
    announce_placement(call, placement)
    plan = replace(subject.plan, gpu=placement.device.type == "cuda")
    parts = measure_memory(subject.folder, plan, placement, allow_nonfinite=engine.allow_nonfinite)
    compared = [{"part": p.name, "predicted": p.predicted, "actual": p.actual, "error": p.error} for p in parts]
    answer = {"model": subject.model, "context": plan.context, "parts": compared, "tolerance": tolerance}
    if not call.out.answered(answer):
        rows = [[p.name, human_bytes(p.predicted), human_bytes(p.actual), f"{p.error:+.1%}"] for p in parts]
        call.out.table(["part", "predicted", "actual", "error"], rows, right=(1, 2, 3))
    check_parts(parts, tolerance)


def _plan(call: Call, folder: ModelFolder, engine: EngineConfig, gpu: bool) -> MemoryPlan:
    config = folder.config
    check_context(folder, engine.context)
    if engine.draft == MTP:
        draft: ModelFolder | None = mtp_head(folder)
    else:
        draft = None if engine.draft in (None, NGRAM) else open_config(call, engine.draft)
    return MemoryPlan(
        config,
        folder.packings,
        context=engine.context or min(DEFAULT_CONTEXT, config.max_context),
        batch=engine.sequences,
        dtype=engine.dtype,
        gpu=gpu,
        draft=None if draft is None else MemoryPlan(draft.config, draft.packings, kv=engine.kv),
        kv=engine.kv,
        shadow=engine.dense_prefill_copy,
    )


def _wish(plan: MemoryPlan, quant: str | None, head: str) -> PackingScheme:
    if plan.packings and (quant or head != "keep"):
        raise UsageError("this model is quantized already", "omit --quant and --head, or name the original")
    bits = HEADS[options.choice("--head", head, tuple(HEADS))]
    if quant is None and bits:
        raise UsageError(f"--head {head} needs --quant", "add --quant int4-g128, for example")
    packing = parse_packing(quant) if quant else None
    if packing and packing.codes != "int" and bits:
        raise UsageError(f"--head {head}: {packing.codes} keeps the head as it is", "omit --head")
    return PackingScheme(packing, Packing(bits, packing.group_size) if packing and bits else None)


def _parse_share(text: str) -> float:
    """`3%` or `0.03` as a number above 0, at most 1. Raises UsageError."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1
    if not 0 < value <= 1:
        raise UsageError(f"--tol {text}: not a percentage", "give a percentage such as 3%")
    return value


@command
def estimate(
    call: Call,
    model: options.Model,
    loading: LoadFlags,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Sequences at a time.")] = 1,
    quant: Annotated[
        str | None,
        typer.Option("--quant", metavar="SCHEME", help="Estimate as if quantized: int4-g128, int8-channel, nf4-g64."),
    ] = None,
    head: Annotated[
        str, typer.Option("--head", metavar="|".join(HEADS), help="With --quant: the output projection.")
    ] = "keep",
    gpu: Annotated[int | None, options.size_option("--gpu", help="Estimate as if a GPU had this free: 24GiB.")] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            "--bandwidth", metavar="X", min=0.001, help="Memory bandwidth in GB/s.", show_default="this machine's"
        ),
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", min=1, help="Say whether vLLM can split it over N GPUs.", metavar="N")
    ] = None,
    fit: Annotated[bool, typer.Option("--fit", help="Choose scheme and context that fit; print the commands.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Show every scheme by several contexts.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Load it, run it, and compare.")] = False,
    tol: Annotated[
        str, typer.Option("--tol", metavar="SHARE", help="What --verify tolerates, and --fit leaves free.")
    ] = "3%",
) -> None:
    """Say how much memory a model takes and whether it fits.

    Also says how fast it could be at best. Needs config.json only.
    """
    if fit + table + verify > 1:
        raise UsageError("--fit, --table and --verify exclude each other", "give one of them")
    engine = loading.resolve(batch)
    if verify and (gpu or quant or head != "keep" or engine.draft):
        raise UsageError("--verify runs the model as it is", "omit --gpu, --quant, --head and --draft")
    tolerance = _parse_share(tol)
    target = Target("gpu", "as given", True, gpu) if gpu else find_target(engine.device, state_dir())
    for note in target.notes:
        call.out.note(note)
    if bandwidth is not None:
        target = replace(target, bandwidth=bandwidth, bandwidth_source="as given")
    folder = adapted(call, open_config(call, model, fetch=not verify), model, engine.adapter)
    plan = _plan(call, folder, engine, target.gpu)
    scheme = _wish(plan, quant, head)
    plan = replace(plan, packings=scheme.packings(plan.config) or plan.packings)
    subject = EstimateSubject(model, folder, plan, target, scheme)
    if not table and not fit:
        subject = _streamed(subject, engine)
    if table:
        _table(call, subject)
    elif fit:
        _fit(call, subject, engine.context, tolerance)
    elif verify:
        _verify(call, subject, engine, tolerance)
    else:
        _show(call, subject, tp)
