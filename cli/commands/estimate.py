"""`mycli estimate`: how much memory a model takes, whether it fits, and how fast it could decode at best."""

import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import LoadFlags
from mycli.cli.load import adapted, announce_placement, check_context, find_predictor, open_config
from mycli.cli.other_engines import RANKS, beyond_one_gpu
from mycli.cli.text.format import active, experts_held
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.disk import ASSUMED, read_rate
from mycli.runtime.device.probe import Target, find_target
from mycli.runtime.diagnostics.vllm_tp import obstacles
from mycli.runtime.engine.config import MTP, NGRAM, EngineConfig
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.store import state
from mycli.runtime.memory import estimate as memory
from mycli.runtime.memory.ceiling import tokens_per_second, tokens_per_second_from_disk
from mycli.runtime.memory.fit import PackingScheme, fit, schemes, shortage
from mycli.runtime.memory.plan import DEFAULT_CONTEXT, MemoryPlan
from mycli.runtime.memory.resident import keep_fitting, most_experts
from mycli.runtime.memory.weights import shadow_bytes
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
SEQUENCE_PARALLEL = (
    "also use an engine that splits the sequence: vLLM's --decode-context-parallel-size, or ring attention"
)
BANDWIDTH_HINT = "unknown: measure it with mycli doctor, or give --bandwidth"


@dataclass(frozen=True)
class _Subject:
    """A model, how its weights are held, and where it would run."""

    model: str
    folder: ModelFolder
    plan: MemoryPlan
    target: Target
    wish: PackingScheme  # what --quant and --head ask for
    disk: tuple[float, str] | None = None  # GB/s of reading experts, and whence; None where all are in memory

    @property
    def scheme(self) -> str:
        """int4-g128, several joined by +, or the dtype of a dense model."""
        names = sorted({packing.name for packing in self.plan.packings.values()})
        return "+".join(names) or self.plan.dtype or self.plan.config.dtype


def _number(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.1f}"


def _ceilings(subject: _Subject) -> dict[int, float]:
    """Tokens per second by depth: an empty and a full cache. Empty where the bandwidth is unknown."""
    bandwidth = subject.target.bandwidth
    if bandwidth is None:
        return {}
    return {depth: tokens_per_second(subject.plan, depth, bandwidth) for depth in (0, subject.plan.context)}


def _from_disk(subject: _Subject) -> float | None:
    """Tokens per second of an empty cache where no expert that is chosen is in memory; None where all are."""
    bandwidth = subject.target.bandwidth
    if subject.disk is None or bandwidth is None:
        return None
    return tokens_per_second_from_disk(subject.plan, 0, bandwidth, subject.disk[0])


def _streamed(subject: _Subject, engine: EngineConfig) -> _Subject:
    """`subject` with the experts in memory that fit, or that are allowed, where that is not all of them."""
    found = keep_fitting(subject.plan, subject.target.free, engine.expert_bytes)
    if found.expert_slots is None:
        return subject
    measured = None
    with suppress(ModelError):  # where there are no weights yet, there is nothing to read
        files = () if subject.folder.bare else subject.folder.manifest.files.values()
        measured = read_rate(max(files, key=lambda file: file.size).path) if files else None
    disk = (ASSUMED, "assumed") if measured is None else (measured, "measured")
    return replace(subject, plan=found, disk=disk)


def _obstacle_lines(subject: _Subject, ranks: int) -> list[str]:
    return [
        f"{one.where}: {one.problem}" + (f" ({one.layers} layers)" if one.layers > 1 else "")
        for one in obstacles(subject.plan.config, subject.plan.packings, ranks)
    ]


def _more_gpus(subject: _Subject) -> tuple[int, int | None, str] | None:
    """Where one GPU ends: the context that it does not hold, how many would, None for none of one machine, and how.

    None where one GPU holds all that the model was made for, and on a CPU.
    """
    plan, free = subject.plan, subject.target.free
    if not subject.target.gpu or subject.wish.packing is not None:
        return None
    most = replace(plan, context=plan.config.max_context)
    beyond = next((one for one in (plan, most) if memory.estimate(one).total > free), None)
    if beyond is None:
        return None
    found = beyond_one_gpu(subject.model, beyond, free)
    if found is None:
        return beyond.context, None, SEQUENCE_PARALLEL
    return beyond.context, *found


def _as_json(subject: _Subject, ranks: int | None) -> dict[str, Any]:
    plan, target, result = subject.plan, subject.target, memory.estimate(subject.plan)
    found: dict[str, Any] = {
        "model": subject.model,
        "scheme": subject.scheme,
        "parameters": plan.config.parameters(),
        "active_parameters": plan.config.active_parameters(),
        "context": plan.context,
        "batch": plan.batch,
        "device": target.place,
        "device_name": target.name,
        "bytes": {
            "weights": result.weights,
            "embeddings_and_head": result.embeddings,
            "cache": result.cache,
            "draft": result.draft,
            "workspace": result.workspace.total,
            "runtime": result.runtime,
            "total": result.total,
            "free": target.free,
        },
        "workspace_bytes": vars(result.workspace),
        "fits": result.total <= target.free,
        "longest_context": memory.longest_context(plan, target.free),
        "bandwidth_gb_per_second": target.bandwidth,
        "bandwidth_source": target.bandwidth_source,
        "ceiling_tokens_per_second": [{"depth": d, "rate": rate} for d, rate in _ceilings(subject).items()],
    }
    if subject.disk is not None:
        found["experts"] = {
            "in_memory": plan.expert_slots,
            "of": most_experts(plan.config),
            "disk_gb_per_second": subject.disk[0],
            "disk_source": subject.disk[1],
            "ceiling_tokens_per_second_without_hits": _from_disk(subject),
        }
    if (adapter := subject.folder.adapter) is not None:
        found["adapter"] = {"merged": len(adapter.added) + len(adapter.instead), "file_bytes": adapter.nbytes}
    more = _more_gpus(subject)
    if more is not None:
        found["more_gpus"] = {"context": more[0], "gpus": more[1], "command": more[2]}
    if ranks is not None:
        lines = _obstacle_lines(subject, ranks)
        each = memory.rank_bytes(plan, ranks)
        found["tensor_parallel"] = {"ranks": ranks, "possible": not lines, "obstacles": lines, "bytes_each": each}
    return found


def _rows(subject: _Subject) -> list[tuple[str, str]]:
    plan, target, result = subject.plan, subject.target, memory.estimate(subject.plan)
    space, longest = result.workspace, memory.longest_context(plan, target.free)
    verdict = f"fits, {human_bytes(target.free - result.total)} to spare"
    if result.total > target.free:
        verdict = f"does not fit: {human_bytes(result.total - target.free)} too much"
    limit = ", the model's limit" if longest == plan.config.max_context else ""
    passes = f"passes {human_bytes(space.activations)}, dequantization {human_bytes(space.dequantization)}"
    states = memory.all_state_bytes(plan)
    per_token = (result.cache - states) // (plan.context * plan.batch) / 1024
    kept = f"; {human_bytes(states)} of it states" if states else ""
    copied = f"; {human_bytes(shadow_bytes(plan))} a copy in 16 bits" if plan.shadow else ""
    rows = [
        ("weights", f"{human_bytes(result.weights)}  ({plan.config.layers} blocks, {subject.scheme}{copied})"),
        ("embeddings and head", human_bytes(result.embeddings) + ("  (tied)" if plan.config.tie_embeddings else "")),
        (
            "KV cache",
            f"{human_bytes(result.cache)}  ({plan.context} tokens x {plan.batch}, {per_token:.1f} KiB a token{kept})",
        ),
        ("workspace", f"{human_bytes(space.total)}  ({passes})"),
        ("CUDA context" if target.gpu else "Python and torch", human_bytes(result.runtime)),
        ("total", human_bytes(result.total)),
        ("free", f"{human_bytes(target.free)} on {target.place} ({target.name})"),
        ("verdict", verdict),
        ("longest context", f"{longest} tokens{limit}"),
    ]
    if plan.draft is not None:
        rows.insert(3, ("draft", human_bytes(result.draft)))
    if (adapter := subject.folder.adapter) is not None:
        size = f"{len(adapter.added)} of them changed by {human_bytes(adapter.nbytes)} while they are read"
        rows.insert(1, ("adapter", f"0 bytes  (merged into the weights: {size})"))
    more = _more_gpus(subject)
    if more is not None:
        context, gpus, how = more
        where = f"{gpus} such GPUs" if gpus else f"more than {RANKS[-1]} such GPUs"
        rows.append(("beyond one GPU", f"{context} tokens take {where}: {how}"))
    if subject.disk is not None:
        rows.insert(1, ("experts", experts_held(plan)))
    speeds = [f"{_number(rate)} tok/s {f'at {d} tokens' if d else 'empty'}" for d, rate in _ceilings(subject).items()]
    source = f"  ({target.bandwidth:g} GB/s, {target.bandwidth_source})" if target.bandwidth else ""
    rows.append(("ceiling", ", ".join(speeds) + source if speeds else BANDWIDTH_HINT))
    if subject.disk is not None and (slowest := _from_disk(subject)) is not None:
        read = f"{subject.disk[0]:.2g} GB/s, {subject.disk[1]}"
        rows.append(("from disk", f"{_number(slowest)} tok/s where no expert chosen is in memory  ({read})"))
    return rows


def _card(call: Call, subject: _Subject) -> None:
    config = subject.plan.config
    parameters = f"{config.parameters():,} parameters{active(config)}"
    call.out.card(f"{subject.model} · {subject.scheme} · {parameters}", _rows(subject))


def _show(call: Call, subject: _Subject, ranks: int | None) -> None:
    if not call.out.answered(_as_json(subject, ranks)):
        _card(call, subject)
        if ranks is not None:
            lines = _obstacle_lines(subject, ranks)
            answer = f"tensor parallel over {ranks} GPUs (vLLM, SGLang with Marlin): " + ("no" if lines else "yes")
            each = [] if lines else [f"on each GPU about {human_bytes(memory.rank_bytes(subject.plan, ranks))}"]
            call.out.result("\n".join([answer, *(f"  {line}" for line in (*lines, *each))]))
    split = ranks is not None and memory.rank_bytes(subject.plan, ranks) <= subject.target.free
    if memory.estimate(subject.plan).total > subject.target.free and not split:
        raise shortage(subject.plan, subject.target.free, subject.target.place)


def _table(call: Call, subject: _Subject) -> None:
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


def _fit(call: Call, subject: _Subject, context: int | None, tolerance: float) -> None:
    """Within what is free even where the estimate is off by as much as --verify tolerates."""
    plan, free = subject.plan, int(subject.target.free / (1 + tolerance))
    fixed = subject.folder.packings or subject.wish != PackingScheme()
    found = fit(plan, free, context, [subject.wish] if fixed else schemes(plan.config))
    if found is None:
        raise shortage(plan, free, subject.target.place).reworded(
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
    if call.out.answered({**_as_json(fitted, None), "commands": commands}):
        return
    _card(call, fitted)
    call.out.result("\n".join(commands))


def _verify(call: Call, subject: _Subject, engine: EngineConfig, tolerance: float) -> None:
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
    check_context(folder, engine)
    if engine.draft == MTP:
        draft: ModelFolder | None = find_predictor(folder)
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
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences at a time.")] = 1,
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
        typer.Option("--bandwidth", min=0.001, help="Memory bandwidth in GB/s.", show_default="this machine's"),
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
    target = Target("gpu", "as given", True, gpu) if gpu else find_target(engine.device, state())
    for note in target.notes:
        call.out.note(note)
    if bandwidth is not None:
        target = replace(target, bandwidth=bandwidth, bandwidth_source="as given")
    folder = adapted(call, open_config(call, model, fetch=not verify), model, engine.adapter)
    plan = _plan(call, folder, engine, target.gpu)
    scheme = _wish(plan, quant, head)
    plan = replace(plan, packings=scheme.packings(plan.config) or plan.packings)
    subject = _Subject(model, folder, plan, target, scheme)
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
