"""`mycli bench`: how fast models are on this machine, in the manner of llama-bench, and whether they became slower."""

import csv
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mycli.cli.bench.results import Row, check_save, compare_results, read_results, save_results
from mycli.cli.bench.serving import ServingFlags, bench_serving, judge, serving_table
from mycli.cli.bench.speculative import bench_draft
from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import LoadFlags
from mycli.cli.load import about, adapted, announce_build, announce_experts, announce_placement
from mycli.cli.plot import require_svg, write_loads
from mycli.cli.text.progress import Neighbours
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import GateError, UsageError, UserError
from mycli.runtime.hub.resolve import Source, resolve
from mycli.runtime.hub.store import state_dir
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.weights import weight_bytes
from mycli.runtime.utils.units import human_bytes

if TYPE_CHECKING:  # torch takes seconds to import, and --help must not wait for it
    from mycli.runtime.device.placement import Placement
    from mycli.runtime.diagnostics.throughput import Result, Trial
    from mycli.runtime.layers.streamed_experts import ExpertReads

EXAMPLES = (
    "mycli bench pico -p 64 -n 16 -r 2",
    "mycli bench pico -p 64 -n 16 -d 0,128 -b 1,2 -r 2 -o csv",
    "mycli bench pico --draft pico-draft -n 16 -r 1",
    "mycli bench pico --serve --clients 1,4 -p 32 -n 8 -r 1",
    "mycli bench pico -p 64 -n 16 -r 3 --save before.json && mycli bench pico -p 64 -n 16 -r 3 --compare before.json",
)
FORMATS = ("md", "json", "jsonl", "csv")
COLUMNS = ("model", "size", "bpw", "device", "kv", "test", "t/s", "TTFT p50", "TPOT p50/p99", "of bandwidth", "peak")
NARROW = (0, 5, 6, 8, 7, 9, 10, 1, 3, 4, 2)  # columns by what a narrow terminal shows first


def _row(common: Mapping[str, Any], result: "Result", read: float | None, bandwidth: float) -> Row:
    from mycli.runtime.diagnostics.throughput import percentile

    first, each = result.first_token_seconds, result.token_seconds
    return {
        **common,
        "test": result.trial.name,
        "tokens_per_second": result.mean,
        "sigma": result.sigma,
        "samples": list(result.rates),
        "ttft_p50_seconds": percentile(first, 0.5) if first else None,
        "tpot_p50_seconds": percentile(each, 0.5) if each else None,
        "tpot_p99_seconds": percentile(each, 0.99) if each else None,
        "bandwidth_share": read / bandwidth if read is not None else None,
        "bandwidth_gb_per_second": bandwidth,
        "peak_bytes": result.peak_bytes,
        "warmup_seconds": result.warmup_seconds,
        "expert_hit_rate": None if result.experts is None else result.experts.hit_rate,
        "expert_gb_per_second": None if result.experts is None else result.experts.gigabytes_per_second,
    }


def _milliseconds(*seconds: float | None) -> str:
    return "/".join(f"{1e3 * value:.1f}" for value in seconds if value is not None) + " ms" if seconds[0] else ""


def _cells(row: Row) -> list[str]:
    share, hits = row["bandwidth_share"], row["expert_hit_rate"]
    return [
        row["model"],
        human_bytes(row["size_bytes"]),
        f"{row['bits_per_weight']:.2f}",
        row["device"],
        row["kv"],
        row["test"],
        f"{row['tokens_per_second']:.2f} ± {row['sigma']:.2f}",
        _milliseconds(row["ttft_p50_seconds"]),
        _milliseconds(row["tpot_p50_seconds"], row["tpot_p99_seconds"]),
        "" if share is None else f"{share:.0%}",
        human_bytes(row["peak_bytes"]),
        *([] if hits is None else [f"{hits:.0%}"]),
    ]


@dataclass(frozen=True)
class _Opened:
    """A model to be measured: what can be known of it before it is loaded."""

    source: Source
    folder: ModelFolder
    placement: "Placement"
    held: MemoryPlan | None  # with the experts in memory, where that is not all of them


def _open(call: Call, model: str, engine: EngineConfig, trials: "Sequence[Trial]") -> _Opened:
    """Every check that needs no loading, so that the last of several models is not refused after the first is done."""
    from mycli.runtime.engine.loader import plan_memory

    with about(call, model):
        source = resolve(model, offline=call.offline)
        folder = adapted(call, open_model_folder(source.folder), model, engine.adapter)
        folder.checked_manifest()
    placement = engine.place(folder.config)
    plans = []
    for trial in trials:
        if trial.context > folder.config.max_context:
            problem = f"{trial.name} needs {trial.context} positions, {model} has {folder.config.max_context}"
            raise UsageError(problem, "choose smaller -p, -n or -d")
        plans.append(plan_memory(folder, placement, replace(engine, context=trial.context, sequences=trial.sequences)))
    some = (plan for plan in plans if plan.expert_slots is not None)
    return _Opened(source, folder, placement, min(some, key=lambda plan: plan.expert_slots or 0, default=None))


def _weight_bytes(loaded: int, held: MemoryPlan | None) -> int:
    """Of all weights, where `loaded` are in memory."""
    return loaded if held is None else loaded + weight_bytes(replace(held, expert_slots=None)) - weight_bytes(held)


def _experts(reads: "ExpertReads") -> str:
    rate = reads.gigabytes_per_second
    read = "" if rate is None else f", {human_bytes(reads.nbytes)} of others read at {rate:.2g} GB/s"
    return f"{reads.hit_rate:.0%} of the experts chosen were in memory{read}"


def _measure(call: Call, opened: _Opened, trials: "Sequence[Trial]", repetitions: int) -> list[Row]:
    """All trials of one model. What the device reads is measured before and after: a busy moment makes it less."""
    from mycli.runtime.device.placement import dtype_info
    from mycli.runtime.diagnostics import throughput as bench
    from mycli.runtime.engine.loader import load_model

    source, folder, placement = opened.source, opened.folder, opened.placement
    announce_placement(call, placement)
    announce_build(call, placement)
    began = time.perf_counter()
    if opened.held is not None:
        announce_experts(call, opened.held)
    runner = load_model(folder, placement, expert_slots=None if opened.held is None else opened.held.expert_slots)
    loaded = time.perf_counter() - began
    bench.measure_device(placement.device, state_dir())
    common = {
        "model": source.name,
        "size_bytes": runner.nbytes,
        "bits_per_weight": 8 * _weight_bytes(runner.nbytes, opened.held) / folder.config.parameters(),
        "device": str(placement.device),
        "dtype": dtype_info(placement.dtype).short,
        "kv": dtype_info(placement.dtype).short if placement.kv == "auto" else placement.kv,
        "load_seconds": loaded,
    }
    found, neighbours = [], Neighbours()
    with call.out.progress(source.name, len(trials) * repetitions, "runs") as bar:
        for trial in trials:
            bar.describe(f"{source.name} {trial.name}")
            result = bench.run_trial(runner, trial, repetitions, progress=lambda _: bar.advance(1))
            plan = MemoryPlan(
                folder.config, folder.packings, trial.context, trial.sequences, placement.dtype_name, kv=placement.kv
            )
            found.append((result, result.read_rate(plan)))
            call.out.detail(f"{trial.name}: first run {result.warmup_seconds:.2f} s, not counted")
            if result.experts is not None:
                call.out.note(f"{trial.name}: {_experts(result.experts)}")
    if disturbed := neighbours.note():
        call.out.note(f"({disturbed}: these figures are lower than what it can do)")
    # A model beyond any cache that is read faster than the device was measured to read: the measurement was disturbed.
    seen = max((read for _, read in found if read and runner.nbytes > bench.MEASURED_BYTES // 4), default=0.0)
    _, bandwidth = bench.measure_device(placement.device, state_dir(), seen)
    call.out.note(f"{source.name}: loaded in {loaded:.1f} s; this device reads {bandwidth:.1f} GB/s (measured)")
    return [_row(common, result, read, bandwidth) for result, read in found]


def _print(call: Call, rows: Sequence[Row], style: str) -> None:
    if style == "json":
        call.out.json({"results": list(rows)})
    elif style == "jsonl":
        for row in rows:
            call.out.json_record(row)
    elif style == "csv":
        text = io.StringIO()
        flat = [{**row, "samples": " ".join(map(str, row["samples"]))} for row in rows]
        writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        call.out.result(text.getvalue().rstrip("\n"))
    elif "failed" in rows[0]:
        serving_table(call, rows)
    else:
        some = any(row["expert_hit_rate"] is not None for row in rows)  # of these models not all experts are in memory
        headings, order = (*COLUMNS, *["expert hits"] * some), (*NARROW, *[len(COLUMNS)] * some)
        cells = [_cells(row) for row in rows]
        padded = [[*each, *[""] * (len(headings) - len(each))] for each in cells]
        call.out.table(headings, padded, right=(1, 2, *range(6, len(headings))), order=order)


def _parse_share(text: str | None) -> float | None:
    if text is None:
        return None
    number = text.removesuffix("%")
    if not text.endswith("%") or not number.replace(".", "", 1).isdecimal():
        raise UsageError(f"--fail-on-regress {text}: not a percentage", "write it as 5%")
    return float(number) / 100


def _check_files(compare: Path | None, save: Path | None) -> None:
    """A bad file is told before minutes of work."""
    if compare is not None:
        read_results(compare)
    if save is not None:
        check_save(save)


def _keep(
    call: Call, rows: Sequence[Row], style: str, compare: Path | None, save: Path | None, limit: float | None
) -> None:
    """Show the results, compare and save them where that is asked. Raises GateError for what is slower by `limit`."""
    changes = compare_results(call, rows, compare, style) if compare is not None and style != "md" else []
    _print(call, rows, style)
    if compare is not None and style == "md":
        changes = compare_results(call, rows, compare, style)
    if save is not None:
        save_results(save, rows)
    slower = [
        f"{row['model']} {row['test']} {change.relative:+.1%}"
        for row, change in changes
        if limit is not None and change.regressed(limit)
    ]
    if slower:
        raise GateError(
            "slower than before: " + ", ".join(slower), f"see {compare}; other work on the machine slows it too"
        )


@command
def bench(
    call: Call,
    models: options.Models,
    prompt: Annotated[str, typer.Option("-p", "--prompt", metavar="N,...", help="Prompt lengths; 0: none.")] = "512",
    generate: Annotated[str, typer.Option("-n", "--generate", metavar="N,...", help="Reply lengths; 0: none.")] = "128",
    depth: Annotated[str, typer.Option("-d", "--depth", metavar="N,...", help="Tokens already in the cache.")] = "0",
    batch: Annotated[str, typer.Option("-b", "--batch", metavar="N,...", help="Sequences at a time.")] = "1",
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", metavar="N", min=1, max=1000, help="Runs of each test.")
    ] = 5,
    output: Annotated[
        str,
        options.word_option("-o", "--output", words=FORMATS, help="How to print."),
    ] = "md",
    save: Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Save the results.")] = None,
    compare: Annotated[
        Path | None, typer.Option("--compare", metavar="FILE", help="Compare with saved results.")
    ] = None,
    fail_on_regress: Annotated[
        str | None,
        typer.Option("--fail-on-regress", metavar="5%", help="Exit with 6 if a test is slower by more than this."),
    ] = None,
    adapter: options.AdapterName = None,
    draft: options.Draft = "none",
    device: options.Device = "auto",
    threads: options.Threads = None,
    dtype: options.Precision = "auto",
    kv: options.CacheKind = "auto",
    shadow: options.Shadow = False,
    expert_memory: options.ExpertMemory = None,
    *,
    serving: ServingFlags,
) -> None:
    """Measure how fast a model is.

    Tokens per second of prompts (pp) and replies (tg) on synthetic tokens. With --draft: replies of -n tokens to real
    prompts, -r times without and with a draft in turn, by kind of text. With --serve: as clients see a server.
    """
    style = "json" if call.out.json_mode else options.choice("-o", output, FORMATS, "format")
    flags = LoadFlags(adapter, draft, device=device, dtype=dtype, kv=kv, shadow=shadow, expert_memory=expert_memory)
    engine = flags.resolve()
    limit = _parse_share(fail_on_regress)
    if limit is not None and compare is None:
        raise UsageError("--fail-on-regress needs results to compare with", "add --compare FILE")
    if serving.serve:
        if (depth, batch) != ("0", "1"):
            raise UsageError("-d and -b do not apply to --serve", "--shared and --clients are")
        promises = serving.promises()
        loads = serving.loads(options.parse_counts("-p", prompt), options.parse_counts("-n", generate))
        _check_files(compare, save)
        if serving.plot is not None:
            require_svg(serving.plot)
        given = ["--draft", draft, "--device", device, "--dtype", dtype, "--kv", kv, *(["--shadow"] * shadow)]
        given += [] if adapter is None else ["--adapter", adapter]
        given += [] if expert_memory is None else ["--expert-memory", f"{expert_memory}B"]
        rows = list[Row]()
        try:
            for found in bench_serving(call, models, loads, repetitions, given):
                rows += found
        except UserError:
            if rows:
                _print(call, rows, style)
            raise
        _keep(call, rows, style, compare, save, limit)
        if serving.plot is not None:
            write_loads(serving.plot, rows)
            call.out.note(f"drawn in {serving.plot}")
        judge(call, rows, promises, serving.slo or "")
        return
    if serving.slo is not None:
        raise UsageError("--slo applies to a server only", "add --serve")
    if serving.plot is not None:
        raise UsageError("--plot applies to a server under load only", "add --serve")
    if engine.draft is not None:
        if len(models) > 1 or save is not None or compare is not None:
            raise UsageError("--draft measures one model, with and without", "omit --save and --compare")
        (longest, *_) = options.parse_counts("-n", generate)
        bench_draft(call, models[0], engine, limit=max(longest, 2), repetitions=repetitions, style=style)
        return
    from mycli.runtime.diagnostics.throughput import grid

    asked = {"-p": prompt, "-n": generate, "-d": depth, "-b": batch}
    lengths = [options.parse_counts(flag, text) for flag, text in asked.items()]
    if not all(lengths[3]):
        raise UsageError(f"-b {batch}: not a batch size", "count from 1")
    trials = grid(*lengths)
    if not trials:
        raise UsageError("nothing to measure: -p 0 and -n 0", "ask for a prompt or a reply")
    _check_files(compare, save)
    opened = [_open(call, model, engine, trials) for model in models]
    rows = []
    try:
        for one in opened:
            rows += _measure(call, one, trials, repetitions)
    except UserError:
        if rows:
            _print(call, rows, style)  # what was measured is not lost with the model that failed
        raise
    _keep(call, rows, style, compare, save, limit)
