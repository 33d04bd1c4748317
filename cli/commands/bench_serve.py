"""`mycli bench serve`: a server under load as its clients see it, started for the measurement or at a URL."""

import os
import re
import secrets
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import RunFlags
from mycli.cli.load import about
from mycli.cli.output import Column
from mycli.cli.reports.bench_results import Repetitions, ResultFlags, Row
from mycli.cli.reports.plot import require_svg, write_loads
from mycli.cli.serving.local_server import started_server
from mycli.runtime.diagnostics.serving_load import Load
from mycli.runtime.errors import GateError, ModelError, UsageError, UserError
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.utils.units import percent

if TYPE_CHECKING:
    from mycli.runtime.diagnostics.completion_client import CompletionServer
    from mycli.runtime.diagnostics.serving_load import LoadResult

EXAMPLES = (
    "mycli bench serve pico --clients 1,4 -p 32 -n 8 -r 1",
    "mycli bench serve http://127.0.0.1:8000 --clients 8 --shared 256  # needs a server",
    "mycli bench serve Qwen/Qwen3-0.6B --rate 0.5,1,2 --slo ttft=500ms,tpot=50ms  # needs the model",
)
SLO_SHARE = 0.95  # of the replies must meet --slo
SLO_FIELDS = {"ttft": "ttft_p95_seconds", "tpot": "tpot_p95_seconds"}
_URL = r"https?://"
MAX_CLIENTS = 1024  # each client is a connection


def _percentiles(field: str) -> Column:
    def text(row: Row) -> str | None:
        values = [row[f"{field}_p{share}_seconds"] for share in (50, 95, 99)]
        return None if values[0] is None else "/".join(f"{1e3 * value:.0f}" for value in values) + " ms"

    priority = 4 if field == "ttft" else 5
    return Column(f"{field.upper()} p50/p95/p99", text, right=True, priority=priority)


def _queue(row: Row) -> str | None:
    seconds = row["queue_mean_seconds"]
    return None if seconds is None else f"{1e3 * seconds:.0f} ms"


_COLUMNS = (
    Column("server", "model", priority=5),
    Column("test", "test", priority=1),
    Column("t/s", lambda row: f"{row['tokens_per_second']:.1f} ± {row['sigma']:.1f}", right=True, priority=2),
    _percentiles("ttft"),
    _percentiles("tpot"),
    Column("queue", _queue, right=True, priority=8),
    Column(
        "preempted",
        lambda row: None if row["preemptions"] is None else f"{row['preemptions']:.0f}",
        right=True,
        priority=9,
    ),
    Column(
        "cache hits",
        lambda row: percent(row["cached_tokens"] / row["prompt_tokens"]) if row["prompt_tokens"] else None,
        right=True,
        priority=10,
    ),
    Column("failed", lambda row: str(row["failed"] or ""), right=True, priority=6),
)


def _loads(
    prompts: Sequence[int],
    replies: Sequence[int],
    clients: str,
    rates: str | None,
    requests: int | None,
    shared: int,
) -> list[Load]:
    if not all((*prompts, *replies)) or shared >= min(prompts):
        raise UsageError(
            f"-p {min(prompts)}, --shared {shared} and -n {min(replies)}: nothing to send or to reply",
            "-p must be larger than --shared, and -n at least 1",
        )
    lengths = [(prompt, reply) for prompt in prompts for reply in replies]
    if rates is not None:
        numbers = sorted(_rate(text) for text in rates.split(","))
        return [Load(*length, requests or 32, shared, rate=rate) for length in lengths for rate in numbers]
    counts = sorted(options.parse_counts("--clients", clients))
    if not counts[0] or counts[-1] > MAX_CLIENTS:
        raise UsageError(f"--clients {clients} must be 1 to {MAX_CLIENTS}", "for example: --clients 1,4,8")
    return [Load(*length, requests or 4 * count, shared, clients=count) for length in lengths for count in counts]


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.001 <= rate <= 10_000:
        raise UsageError(f"--rate {text}: not a number of requests per second", "use 0.001 to 10000")
    return rate


def _parse_slo(slo: str | None) -> dict[str, float]:
    # field of a row -> limit in seconds
    limits = {}
    for part in slo.split(",") if slo is not None else ():
        match = re.fullmatch(r"(ttft|tpot)=(\d{1,6}(?:\.\d{1,6})?)(ms|s)", part.strip())
        if match is None:
            raise UsageError(f"--slo {slo}: {part!r} is not a limit", "for example: --slo ttft=500ms,tpot=50ms")
        limits[SLO_FIELDS[match[1]]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
    return limits


def _measure_all(
    call: Call, models: Sequence[str], loads: Sequence[Load], repetitions: int, flags: Sequence[str]
) -> Iterator[list[Row]]:
    for model in models:
        if re.match(_URL, model):
            yield _measure(call, model, "http", loads, repetitions, os.environ.get(options.KEY_VARIABLE))
            continue
        # Twice the length: prompts are made of words, and the tokens per word are only estimated.
        context = max(128, *(2 * (load.prompt + load.reply) for load in loads))
        sequences = min(max(load.clients or load.requests for load in loads), 256)
        # Supervised: without a key, whatever the settings say. No records: they would push the replies that users can
        # resume out of the folder.
        mode = ("--ctx", str(context), "--max-sequences", str(sequences), "--supervised", "--no-record")
        with started_server(call, model, *mode, *flags) as served:
            yield _measure(call, str(served["url"]), "own", loads, repetitions, None, model)


def _measure(
    call: Call, url: str, kind: str, loads: Sequence[Load], repetitions: int, key: str | None, name: str | None = None
) -> list[Row]:
    from mycli.runtime.diagnostics.completion_client import CompletionServer
    from mycli.runtime.diagnostics.serving_load import run_load, tokens_per_word

    server = CompletionServer(url, key)
    name = name or f"{server.model} at {url}"
    salt = secrets.randbits(32)  # new prompts each time: the server may still cache those of an earlier measurement
    per_word = tokens_per_word(server)  # also warms up: the first request may compile kernels
    rows = []
    with call.out.progress(name, repetitions * sum(load.requests for load in loads), "replies") as bar:
        for number, load in enumerate(loads):
            bar.describe(f"{name} {load.name}")
            seed = salt + 1000 * number
            runs = [
                run_load(server, load, per_word, seed + run, lambda: bar.advance(1), call.out.require_reader)
                for run in range(repetitions)
            ]
            rows.append(_row(server, name, kind, runs))
    return rows


def _row(server: "CompletionServer", name: str, kind: str, runs: "Sequence[LoadResult]") -> Row:
    from mycli.runtime.diagnostics.throughput import percentile

    answered = [reply for run in runs for reply in run.answered]
    problems = [reply.problem for run in runs for reply in run.replies if reply.problem]
    if not answered:
        raise ModelError(f"{name}: no request was answered: {problems[0]}", "try fewer --clients or a smaller -p")
    ttft = [reply.first_token_seconds for reply in answered]
    tpot = [seconds for reply in answered if (seconds := reply.token_seconds) is not None]
    queue = [run.queue_seconds for run in runs if run.queue_seconds is not None]
    counted = {key: sum(run.counted.get(key, 0.0) for run in runs) for run in runs for key in run.counted}
    rates = [run.rate for run in runs if run.answered]
    row: Row = {
        "model": name,
        "test": runs[0].load.name,
        "device": kind,
        "dtype": server.model,
        "kv": "",
        "tokens_per_second": statistics.fmean(rates),
        "sigma": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "samples": rates,
    }
    for field, values in (("ttft", ttft), ("tpot", tpot)):
        for share in (50, 95, 99):
            row[f"{field}_p{share}_seconds"] = percentile(values, share / 100) if values else None
    return row | {
        "queue_mean_seconds": statistics.fmean(queue) if queue else None,
        "preemptions": counted.get("num_preemptions"),
        "cached_tokens": sum(reply.cached for reply in answered),
        "prompt_tokens": sum(reply.prompt for reply in answered),
        "reply_tokens": sum(reply.tokens for reply in answered),
        "requests": sum(len(run.replies) for run in runs),
        "failed": len(problems),
        "first_problem": problems[0] if problems else None,
    }


def meets_slo(row: Row, limits: Mapping[str, float]) -> bool:
    """Return whether no request failed and the p95 times are within `limits`."""
    return not row["failed"] and all(row[name] is None or row[name] <= limit for name, limit in limits.items())


def _check_slo(call: Call, rows: Sequence[Row], limits: Mapping[str, float], slo: str) -> None:
    servers: dict[str, list[Row]] = {}
    for row in rows:
        servers.setdefault(row["model"], []).extend([row] if meets_slo(row, limits) else [])
    for name, passing in servers.items():
        if passing:
            call.out.note(f"{name}: {passing[-1]['test']} is the largest load that meets {slo} for {SLO_SHARE:.0%}")
    failing = [name for name, passing in servers.items() if not passing]
    if failing:
        raise GateError(f"no load meets --slo {slo}: {', '.join(failing)}", "try fewer clients, or shorter prompts")


@command
def bench_serve(
    call: Call,
    models: Annotated[
        list[str], options.argument("MODEL|URL", "Models to serve, or URLs of servers.", options.complete_model)
    ],
    prompt: Annotated[str, options.option("-p --prompt", "N,...", "Prompt lengths.")] = "512",
    generate: Annotated[str, options.option("-n --generate", "N,...", "Reply lengths.")] = "128",
    clients: Annotated[
        str, options.option("--clients", "N,...", "Numbers of clients, each waiting for its reply.")
    ] = "1,4,8",
    rates: Annotated[
        str | None, options.option("--rate", "R,...", "Requests per second, instead of --clients.")
    ] = None,
    requests: Annotated[
        int | None,
        options.option("--requests", "N", "Requests per run.", min=1, max=100_000, show_default="4 per client"),
    ] = None,
    shared: Annotated[
        int, options.count("--shared", "Length of a prefix that all prompts share, of the -p tokens.")
    ] = 0,
    repetitions: Repetitions = 5,
    plot: Annotated[Path | None, options.option("--plot", "FILE.svg", "Draw speed and times by load.")] = None,
    slo: Annotated[
        str | None,
        options.option(
            "--slo", "ttft=500ms,tpot=50ms", "Find the largest load that meets these limits; exit with 6 if none does."
        ),
    ] = None,
    draft: options.Draft = "none",
    *,
    loading: RunFlags,
    report: ResultFlags,
) -> None:
    """Measure a server under load.

    Prints tokens per second of all clients, time to first token and time per output token. Options such as --draft and
    --kv apply to servers that are started here. The API key of a server at a URL is read from MYCLI_API_KEY.
    """
    loading.resolve()
    limits = _parse_slo(slo)
    lengths = options.parse_counts("-p", prompt), options.parse_counts("-n", generate)
    loads = _loads(*lengths, clients, rates, requests, shared)
    report.check(repetitions)
    if plot is not None:
        require_svg(plot)
    for model in models:
        if not re.match(_URL, model):
            with about(call, model):
                resolve(model, offline=call.offline)  # before minutes of measurements of the models before it
    # Defaults too, over those that config.toml has for a server.
    flags = ["--draft", draft, "--device", loading.device, "--dtype", loading.dtype, "--kv", loading.kv]
    flags += options.option_words(loading)
    rows: list[Row] = []
    try:
        for measured in _measure_all(call, models, loads, repetitions, flags):
            rows += measured
    except UserError:
        if rows:
            report.print(call, rows, _COLUMNS)  # results so far are not lost with the server that failed
        raise
    report.publish(call, rows, _COLUMNS)
    if plot is not None:
        write_loads(plot, rows)
        call.out.note(f"plot written to {plot}")
    if slo is not None:
        _check_slo(call, rows, limits, slo)
