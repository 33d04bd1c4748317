"""`mycli bench`: the speed of models on this machine, in the format of llama-bench."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import RunFlags
from mycli.cli.load import announce_build, announce_experts, announce_passes, announce_placement, open_generative
from mycli.cli.output import Column
from mycli.cli.reasons import activation_text
from mycli.cli.reports.bench_results import Repetitions, ResultFlags, Row
from mycli.cli.text.format import head_format
from mycli.cli.text.progress import CpuContention
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import UsageError, UserError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.hub.store import state_dir
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.weights import weight_bytes
from mycli.runtime.utils.units import human_bytes, percent

if TYPE_CHECKING:  # torch takes seconds to import, and --help must not wait for it
    from mycli.runtime.device.placement import Placement
    from mycli.runtime.diagnostics.throughput import Result, Trial
    from mycli.runtime.engine.model_runner import ModelRunner
    from mycli.runtime.layers.streamed_experts import ExpertReads

EXAMPLES = (
    "mycli bench pico -p 64 -n 16 -r 2",
    "mycli bench pico -p 64 -n 16 -d 0,128 -b 1,2 -r 2 -o csv",
    "mycli bench pico -p 64 -n 16 -r 3 --save before.json && mycli bench pico -p 64 -n 16 -r 3 --compare before.json",
)


def _milliseconds(*seconds: float | None) -> str:
    return "/".join(f"{1e3 * value:.1f}" for value in seconds if value is not None) + " ms" if seconds[0] else ""


def _percent(share: float | None) -> str:
    return "" if share is None else percent(share)


_COLUMNS = (
    Column("model", "model", priority=1),
    Column("size", lambda row: human_bytes(row["size_bytes"]), right=True, priority=8),
    Column("bpw", lambda row: f"{row['bits_per_weight']:.2f}", right=True, priority=11),
    Column("device", "device", priority=9),
    Column("kv", "kv", priority=10),
    Column("test", "test", priority=2),
    Column("t/s", lambda row: f"{row['tokens_per_second']:.2f} ± {row['sigma']:.2f}", right=True, priority=3),
    Column("TTFT p50", lambda row: _milliseconds(row["ttft_p50_seconds"]), right=True, priority=5),
    Column(
        "TPOT p50/p99",
        lambda row: _milliseconds(row["tpot_p50_seconds"], row["tpot_p99_seconds"]),
        right=True,
        priority=4,
    ),
    Column("of bandwidth", lambda row: _percent(row["bandwidth_share"]), right=True, priority=6),
    Column("peak", lambda row: human_bytes(row["peak_bytes"]), right=True, priority=7),
)
EXPERT_HITS = Column("expert hits", lambda row: _percent(row["expert_hit_rate"]), right=True, priority=12)


def _row(common: Mapping[str, Any], result: "Result", read_rate: float | None, bandwidth: float) -> Row:
    from mycli.runtime.diagnostics.throughput import percentile

    ttft, tpot = result.first_token_seconds, result.token_seconds
    return {
        **common,
        "test": result.trial.name,
        "tokens_per_second": result.mean,
        "sigma": result.sigma,
        "samples": list(result.rates),
        "ttft_p50_seconds": percentile(ttft, 0.5) if ttft else None,
        "tpot_p50_seconds": percentile(tpot, 0.5) if tpot else None,
        "tpot_p99_seconds": percentile(tpot, 0.99) if tpot else None,
        "bandwidth_share": read_rate / bandwidth if read_rate is not None else None,
        "bandwidth_gb_per_second": bandwidth,
        "peak_bytes": result.peak_bytes,
        "warmup_seconds": result.warmup_seconds,
        "expert_hit_rate": None if result.experts is None else result.experts.hit_rate,
        "expert_gb_per_second": None if result.experts is None else result.experts.gigabytes_per_second,
    }


@dataclass(frozen=True)
class _Subject:
    source: Source
    folder: ModelFolder
    placement: "Placement"
    partial: MemoryPlan | None  # the plan of the trial with the fewest experts in memory; None if all are


def _check(call: Call, model: str, engine: EngineConfig, trials: "Sequence[Trial]") -> _Subject:
    # Every check that needs no loading, for all models before the first: minutes of work must not end in a refusal.
    from mycli.runtime.engine.loading.loader import plan_memory

    source, folder = open_generative(call, model, engine.adapter)
    placement = engine.place(folder.config)
    plans = []
    for trial in trials:
        if trial.context > folder.config.max_context:
            message = f"{trial.name} needs {trial.context} tokens of context, {model} supports "
            raise UsageError(f"{message}{folder.config.max_context}", "use a smaller -p, -n or -d")
        # Every repetition starts from the cached depth, whose blocks of a window could have been evicted by then.
        config = replace(engine, context=trial.context, sequences=trial.sequences, whole_windows=True)
        plans.append(plan_memory(folder, placement, config))
    partial = (plan for plan in plans if plan.expert_slots is not None)
    fewest = min(partial, key=lambda plan: plan.expert_slots or 0, default=None)
    return _Subject(source, folder, placement, fewest)


def _all_weight_bytes(loaded: int, partial: MemoryPlan | None) -> int:
    if partial is None:
        return loaded
    return loaded + weight_bytes(replace(partial, expert_slots=None)) - weight_bytes(partial)


def _expert_reads(reads: "ExpertReads") -> str:
    rate = reads.gigabytes_per_second
    from_disk = "" if rate is None else f", {human_bytes(reads.nbytes)} read from disk at {rate:.2g} GB/s"
    return f"{percent(reads.hit_rate)} of the experts used were in memory{from_disk}"


def _load(call: Call, subject: _Subject) -> "tuple[ModelRunner, Row]":
    """Load the model; also return what all its rows have in common."""
    from mycli.runtime.device.placement import dtype_info
    from mycli.runtime.engine.loading.loader import load_model

    source, folder, placement = subject.source, subject.folder, subject.placement
    announce_placement(call, placement)
    announce_build(call, placement)
    start = time.perf_counter()
    if subject.partial is not None:
        announce_experts(call, subject.partial)
    expert_slots = None if subject.partial is None else subject.partial.expert_slots
    runner = load_model(folder, placement, expert_slots=expert_slots)
    load_seconds = time.perf_counter() - start
    announce_passes(call, runner)
    head = head_format(folder.config, folder.packings)
    if runner.activations is not None:
        call.out.note(f"{source.name}: {activation_text(runner.activations)}; output head {head}")
    return runner, {
        "model": source.name,
        "size_bytes": runner.nbytes,
        "bits_per_weight": 8 * _all_weight_bytes(runner.nbytes, subject.partial) / folder.config.parameters(),
        "device": str(placement.device),
        "dtype": dtype_info(placement.dtype).short,
        "kv": dtype_info(placement.dtype).short if placement.kv == "auto" else placement.kv,
        "activation_bits": None if runner.activations is None else runner.activations.bits,
        "head": head,
        "load_seconds": load_seconds,
    }


def _measure(call: Call, subject: _Subject, trials: "Sequence[Trial]", repetitions: int) -> list[Row]:
    from mycli.runtime.diagnostics import throughput

    source, folder, placement = subject.source, subject.folder, subject.placement
    runner, common = _load(call, subject)
    # Memory is measured right before and right after each trial, and the better one counts: on a shared host the rate
    # changes from minute to minute, and another program may disturb one of the two.
    rates = [throughput.current_bandwidth(placement.device)]
    results, contention = [], CpuContention()
    with call.out.result_progress(source.name, len(trials) * repetitions, "runs") as bar:
        for trial in trials:
            bar.describe(f"{source.name} {trial.name}")
            result = throughput.run_trial(runner, trial, repetitions, progress=lambda _: bar.advance(1))
            plan = MemoryPlan(
                folder.config, folder.packings, trial.context, trial.sequences, placement.dtype_name, kv=placement.kv
            )
            rates.append(throughput.current_bandwidth(placement.device))
            results.append((result, result.read_rate(plan), max(rates[-2:])))
            call.out.detail(f"{trial.name}: first run {result.warmup_seconds:.2f} s, not counted")
            if result.experts is not None:
                call.out.note(f"{trial.name}: {_expert_reads(result.experts)}")
    if disturbance := contention.note():
        call.out.note(f"({disturbance}; without them it is faster)")
    # A model larger than every cache cannot be read faster than memory: if it was, the measurement was disturbed.
    beyond_caches = runner.nbytes > throughput.MEASURED_BYTES // 4
    ceilings = [max(memory, rate or 0.0) if beyond_caches else memory for _, rate, memory in results]
    throughput.record_device(placement.device, state_dir(), max(*rates, *ceilings))
    low, high = f"{min(ceilings):.1f}", f"{max(ceilings):.1f}"
    span = high if low == high else f"{low} to {high}"
    loaded = f"{source.name}: loaded in {common['load_seconds']:.1f} s"
    call.out.note(f"{loaded}; memory bandwidth {span} GB/s (measured meanwhile)")
    return [_row(common, result, rate, ceiling) for (result, rate, _), ceiling in zip(results, ceilings, strict=True)]


def _complete(incomplete: str) -> list[str]:
    return [*options.complete_word("serve", "draft")(incomplete), *options.complete_model(incomplete)]


@command
def bench(
    call: Call,
    models: Annotated[list[str], options.argument("MODEL", "One or more models.", _complete)],
    prompt: Annotated[str, options.option("-p --prompt", "N,...", "Prompt lengths; 0: none.")] = "512",
    generate: Annotated[str, options.option("-n --generate", "N,...", "Reply lengths; 0: none.")] = "128",
    depth: Annotated[str, options.option("-d --depth", "N,...", "Tokens already in the cache.")] = "0",
    batch: Annotated[str, options.option("-b --batch", "N,...", "Number of concurrent sequences.")] = "1",
    repetitions: Repetitions = 5,
    *,
    loading: RunFlags,
    report: ResultFlags,
) -> None:
    """Measure the speed of models; see also bench serve, bench draft.

    Prints tokens per second for prompts (pp) and replies (tg) of synthetic tokens. `mycli bench serve` measures a
    server under load, `mycli bench draft` the speed-up of a draft.
    """
    from mycli.runtime.diagnostics.throughput import grid

    engine = loading.resolve()
    lists = {"-p": prompt, "-n": generate, "-d": depth, "-b": batch}
    lengths = [options.parse_counts(flag, text) for flag, text in lists.items()]
    if not all(lengths[3]):
        raise UsageError(f"-b {batch}: the batch size must be at least 1", "for example: -b 1,4")
    trials = grid(*lengths)
    if not trials:
        raise UsageError("nothing to measure: -p 0 and -n 0", "use a larger -p or -n")
    report.check(repetitions)
    subjects = [_check(call, model, engine, trials) for model in models]
    rows: list[Row] = []
    try:
        for subject in subjects:
            rows += _measure(call, subject, trials, repetitions)
    except UserError:
        if rows:
            report.print(call, rows, _columns(rows))  # results so far are not lost with the model that failed
        raise
    report.publish(call, rows, _columns(rows))


def _columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    streamed = any(row["expert_hit_rate"] is not None for row in rows)
    return (*_COLUMNS, *[EXPERT_HITS] * streamed)
