"""`mycli estimate`: the memory a model needs, whether it fits, and an upper bound of its speed."""

import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import LoadFlags
from mycli.cli.load import adapted, announce_placement, open_config
from mycli.cli.output import Column
from mycli.cli.reports.estimate_card import EstimateSubject, estimate_json, estimate_rows
from mycli.cli.text.format import active_parameters
from mycli.quant.ggml.mixes import MIXES
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.stable_file import RegularFile
from mycli.runtime.device.disk import ASSUMED, read_rate
from mycli.runtime.device.probe import Target, find_target
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.loading.sizing import requested_plan
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.store import state_dir
from mycli.runtime.memory import estimate as memory
from mycli.runtime.memory.fit import SHORTEST_CONTEXT, PackingScheme, fit, schemes, shortage
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.resident import with_fitting_experts
from mycli.runtime.open import check_context, draft_folder
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
_HEAD_BITS = {"auto": None, "keep": None, "int8": 8, "int4": 4}  # auto may keep it, so that is what must fit
CONTEXTS = (2048, 8192, 32768, 131072)  # columns of --table, up to the model's limit
_PART_COLUMNS = (
    Column("part", "part"),
    Column("predicted", lambda part: human_bytes(part["predicted"]), right=True),
    Column("actual", lambda part: human_bytes(part["actual"]), right=True),
    Column("error", lambda part: f"{part['error']:+.1%}", right=True),
)


def _streamed(subject: EstimateSubject, engine: EngineConfig) -> EstimateSubject:
    # Experts that do not fit, or that --expert-memory does not allow, are read from disk.
    plan = with_fitting_experts(subject.plan, subject.target.free, engine.expert_bytes)
    if plan.expert_slots is None:
        return subject
    measured = None
    with suppress(ModelError):  # without weight files there is nothing to measure
        stored = () if subject.folder.config_only else subject.folder.manifest.files.values()
        files = [file for file in stored if isinstance(file, RegularFile)]
        measured = read_rate(max(files, key=lambda file: file.size).path) if files else None
    disk = (ASSUMED, "assumed") if measured is None else (measured, "measured")
    return replace(subject, plan=plan, disk=disk)


def _card(call: Call, subject: EstimateSubject, answer: dict[str, Any]) -> None:
    config = subject.plan.config
    parameters = f"{config.parameters():,} parameters{active_parameters(config)}"
    call.out.card(f"{subject.model} · {subject.scheme_name} · {parameters}", estimate_rows(subject, answer))


def _show(call: Call, subject: EstimateSubject, ranks: int | None) -> None:
    answer = estimate_json(subject, ranks)
    parallel = answer.get("tensor_parallel")
    if not call.out.answered(answer):
        _card(call, subject, answer)
        if parallel is not None:
            verdict = "yes" if parallel["possible"] else "no"
            lines = parallel["obstacles"] or [f"about {human_bytes(parallel['bytes_each'])} per GPU"]
            title = f"tensor parallel over {ranks} GPUs (vLLM, SGLang with Marlin): {verdict}"
            call.out.result("\n".join([title, *(f"  {line}" for line in lines)]))
    split = parallel is not None and parallel["possible"] and parallel["bytes_each"] <= subject.target.free
    if memory.estimate(subject.plan).total > subject.target.free and not split:
        raise shortage(subject.plan, subject.target.free, subject.target.place)


def _table(call: Call, subject: EstimateSubject) -> None:
    plan, free = subject.plan, subject.target.free
    limit = plan.config.max_context
    contexts = sorted({*(c for c in CONTEXTS if c <= limit), min(limit, CONTEXTS[-1]), plan.context})
    if plan.packings:
        choices = [(subject.scheme_name, plan)]
    else:
        choices = [(s.name(plan.config), replace(plan, packings=s.packings(plan.config))) for s in schemes(plan.config)]
    totals = {
        (name, context): memory.estimate(replace(choice, context=context)).total
        for name, choice in choices
        for context in contexts
    }
    table = [
        {"scheme": name, "context": context, "total_bytes": total, "fits": total <= free}
        for (name, context), total in totals.items()
    ]
    if call.out.answered({"model": subject.model, "free_bytes": free, "table": table}):
        return

    def total_column(context: int) -> Column:
        def text(name: str) -> str:
            total = totals[name, context]
            return human_bytes(total) + ("" if total <= free else " !")

        return Column(str(context), lambda row: text(row["scheme"]), right=True)

    columns = (Column("scheme", "scheme"), *map(total_column, contexts))
    call.out.table([{"scheme": name} for name, _ in choices], columns)
    if max(totals.values()) > free:
        call.out.note(f"! needs more than the {human_bytes(free)} free on {subject.target.place}")


def _fit(call: Call, subject: EstimateSubject, context: int | None, tolerance: float) -> None:
    # Leaves room for an estimate that is too low by as much as --verify tolerates.
    plan, free = subject.plan, int(subject.target.free / (1 + tolerance))
    fixed = subject.folder.packings or subject.scheme != PackingScheme()
    choices = [subject.scheme] if fixed else schemes(plan.config)
    choice = fit(plan, free, context, choices)
    if choice is None:
        shortest = context or min(SHORTEST_CONTEXT, plan.config.max_context)
        packings = choices[-1].packings(plan.config) or plan.packings
        smallest = replace(plan, packings=packings, context=shortest)
        name = subject.scheme_name if fixed else choices[-1].name(plan.config)
        raise shortage(smallest, free, subject.target.place).with_message(
            f"{subject.model}: no scheme fits into {human_bytes(subject.target.free)} with {tolerance:.0%} to spare: "
            f"{name} with {shortest} tokens needs {human_bytes(memory.estimate(smallest).total)}"
        )
    plan, scheme = choice
    name, commands = subject.model, []
    if scheme.packing is not None:
        name = f"{Path(subject.model.partition('@')[0]).name}-{scheme.packing.name}"
        group = scheme.packing.group_size or "channel"
        head = f" --head int{scheme.head.bits}" if scheme.head else ""
        integers = scheme.packing.codes == "int"
        method = f"--bits {scheme.packing.bits}" if integers else f"--method {scheme.packing.codes}"
        flags = f"{method} --group {group}{head}"
        commands.append(f"mycli quantize {shlex.quote(subject.model)} {flags} -o {shlex.quote(name)}")
    commands.append(f"mycli chat {shlex.quote(name)} --ctx {plan.context}")
    fitted = replace(subject, plan=plan)
    answer = {**estimate_json(fitted, None), "commands": commands}
    if not call.out.answered(answer):
        _card(call, fitted, answer)
        call.out.result("\n".join(commands))


def _verify(call: Call, subject: EstimateSubject, engine: EngineConfig, tolerance: float) -> None:
    from mycli.runtime.diagnostics.memory_check import check_parts, measure_memory

    placement = engine.place(subject.folder.config)
    announce_placement(call, placement)
    plan = replace(subject.plan, gpu=placement.device.type == "cuda")
    parts = measure_memory(subject.folder, plan, placement, allow_nonfinite=engine.allow_nonfinite)
    compared = [{"part": p.name, "predicted": p.predicted, "actual": p.actual, "error": p.error} for p in parts]
    answer = {"model": subject.model, "context": plan.context, "parts": compared, "tolerance": tolerance}
    call.out.show(answer, _PART_COLUMNS, rows="parts")
    check_parts(parts, tolerance)


def _plan(call: Call, folder: ModelFolder, engine: EngineConfig, *, gpu: bool) -> MemoryPlan:
    check_context(folder, engine.context)
    draft = draft_folder(folder, engine.draft, lambda name: open_config(call, name))
    return requested_plan(folder, engine, draft, gpu=gpu)


def _scheme(plan: MemoryPlan, quant: str | None, head: str) -> PackingScheme:
    if plan.packings and (quant or _HEAD_BITS.get(head)):
        raise UsageError("this model is already quantized", "omit --quant and --head, or name the original model")
    bits = _HEAD_BITS[options.choice("--head", head, tuple(_HEAD_BITS))]
    if quant and quant.lower() in MIXES:
        hint = f"its exact size: mycli quantize MODEL --bits {quant.lower()} --dry-run"
        raise UsageError(f"--quant {quant}: a type of GGUF files", hint)
    if quant is None and bits:
        raise UsageError(f"--head {head} needs --quant", "for example: --quant int4-g128")
    packing = parse_packing(quant) if quant else None
    if packing and packing.codes != "int" and bits:
        raise UsageError(f"--head {head}: {packing.codes} leaves the head unquantized", "omit --head")
    return PackingScheme(packing, Packing(bits, packing.group_size) if packing and bits else None)


def _parse_share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1
    if not 0 < value <= 1:
        raise UsageError(f"--tol {text}: not a percentage", "for example: --tol 3%")
    return value


@command
def estimate(
    call: Call,
    model: options.Model,
    loading: LoadFlags,
    batch: Annotated[int, options.option("--batch", "N", "Number of concurrent sequences.", min=1)] = 1,
    quant: Annotated[
        str | None, options.option("--quant", "SCHEME", "Estimate as if quantized: int4-g128, int8-channel, nf4-g64.")
    ] = None,
    head: Annotated[
        str,
        options.option(
            "--head", "|".join(_HEAD_BITS), "With --quant: how the output head is stored; auto: counted as unquantized."
        ),
    ] = "auto",
    gpu: Annotated[int | None, options.size("--gpu", "Estimate for a GPU with this much free memory.")] = None,
    bandwidth: Annotated[
        float | None,
        options.option(
            "--bandwidth", "X", "Memory bandwidth in GB/s.", min=0.001, max=1_000_000, show_default="this machine's"
        ),
    ] = None,
    tp: Annotated[
        int | None, options.option("--tp", "N", "Check whether vLLM can split it over N GPUs.", min=1)
    ] = None,
    fit: Annotated[bool, options.flag("--fit", "Choose scheme and context that fit; print the commands.")] = False,
    table: Annotated[bool, options.flag("--table", "Print all schemes with several contexts.")] = False,
    verify: Annotated[bool, options.flag("--verify", "Load and run the model, and compare with the estimate.")] = False,
    tol: Annotated[str, options.option("--tol", "SHARE", "Error that --verify accepts and --fit allows for.")] = "3%",
) -> None:
    """Estimate how much memory a model needs and whether it fits.

    Also prints an upper bound of tokens per second, from the memory bandwidth. Only config.json is needed.
    """
    if fit + table + verify > 1:
        raise UsageError("--fit, --table and --verify exclude each other", "use one of the three")
    engine = loading.resolve(batch)
    if verify and (gpu or quant or _HEAD_BITS.get(head) or engine.draft):
        raise UsageError("--verify runs the model unchanged on this machine", "omit --gpu, --quant, --head and --draft")
    tolerance = _parse_share(tol)
    target = Target("gpu", "as given", True, gpu) if gpu else find_target(engine.device, state_dir())
    for note in target.notes:
        call.out.note(note)
    if bandwidth is not None:
        target = replace(target, bandwidth=bandwidth, bandwidth_source="as given")
    folder = adapted(call, open_config(call, model, fetch=not verify), model, engine.adapter)
    plan = _plan(call, folder, engine, gpu=target.gpu)
    scheme = _scheme(plan, quant, head)
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
