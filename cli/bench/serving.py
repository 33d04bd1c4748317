"""What `mycli bench --serve` measures and shows: a server under load, ours (started for it) or one at an address.

Knows flags, tables and words. The load and the clocks are `runtime.diagnostics.serving_load`.
"""

import json
import os
import re
import secrets
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mycli.cli.bench.results import Row
from mycli.cli.command import Call
from mycli.cli.flags import options
from mycli.runtime.errors import GateError, ModelError, UsageError

if TYPE_CHECKING:  # nothing slow, but no other test of `bench` needs it
    from mycli.runtime.diagnostics.completion_client import CompletionServer
    from mycli.runtime.diagnostics.serving_load import Load, LoadResult

_COLUMNS = ("server", "test", "t/s", "TTFT p50/p95/p99", "TPOT p50/p95/p99", "queue", "preempted", "hits", "failed")
_NARROW = (1, 2, 3, 4, 0, 8, 7, 5, 6)  # columns by what a narrow terminal shows first
_STOP_SECONDS = 60
_PART = 0.95  # of the replies must keep what --slo asks
_PROMISES = {"ttft": "ttft_p95_seconds", "tpot": "tpot_p95_seconds"}


@dataclass(frozen=True)
class ServingFlags:
    """What load a server is put under, as it was typed."""

    serve: Annotated[
        bool, typer.Option("--serve", help="Measure a server: MODEL is served for it, or is the address of one.")
    ] = False
    clients: Annotated[
        str, typer.Option("--clients", metavar="N,...", help="With --serve: clients that always wait for a reply.")
    ] = "1,4,8"
    rates: Annotated[
        str | None, typer.Option("--rate", metavar="R,...", help="With --serve: requests per second, not --clients.")
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            metavar="N",
            min=1,
            max=100_000,
            help="With --serve: requests in each run.",
            show_default="4 per client",
        ),
    ] = None
    shared: Annotated[
        int, options.count_option("--shared", help="With --serve: of the -p tokens, how many all prompts begin with.")
    ] = 0
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="With --serve: draw speed and times by load.")
    ] = None
    slo: Annotated[
        str | None,
        typer.Option(
            "--slo",
            metavar="ttft=500ms,tpot=50ms",
            help="Find the largest load that keeps it; exit with 6 if none does.",
        ),
    ] = None

    def loads(self, prompts: Sequence[int], replies: Sequence[int]) -> "list[Load]":
        """Every combination, the smallest load first. Raises UsageError."""
        from mycli.runtime.diagnostics.serving_load import Load

        if not all((*prompts, *replies)) or self.shared >= min(prompts):
            raise UsageError(
                f"prompts of {min(prompts)} tokens, {self.shared} of them shared, and replies of {min(replies)}",
                "a prompt needs a token of its own, and a reply one: choose another -p, -n or --shared",
            )
        if self.rates is not None:
            rates = sorted(_rate(text) for text in self.rates.split(","))
            return [
                Load(prompt, reply, self.requests or 32, self.shared, rate=rate)
                for prompt in prompts
                for reply in replies
                for rate in rates
            ]
        clients = sorted(options.parse_counts("--clients", self.clients))
        if not clients[0] or clients[-1] > 1024:
            raise UsageError(f"--clients {self.clients}: 1 to 1024", "each client is a connection")
        return [
            Load(prompt, reply, self.requests or 4 * count, self.shared, clients=count)
            for prompt in prompts
            for reply in replies
            for count in clients
        ]

    def promises(self) -> dict[str, float]:
        """What --slo asks, in seconds by the row's field. Raises UsageError."""
        found = {}
        for part in self.slo.split(",") if self.slo is not None else ():
            match = re.fullmatch(r"(ttft|tpot)=(\d{1,6}(?:\.\d{1,6})?)(ms|s)", part.strip())
            if match is None:
                raise UsageError(f"--slo {self.slo}: {part!r} is not a limit", "write it as ttft=500ms,tpot=50ms")
            found[_PROMISES[match[1]]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
        return found


def _rate(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.001 <= found <= 10_000:
        raise UsageError(f"--rate {text}: not a number of requests per second", "0.001 to 10000")
    return found


@contextmanager
def _own_server(model: str, flags: Sequence[str], context: int, together: int) -> Iterator[str]:
    """The address of `mycli serve` of a model, while the context lasts."""
    command = [sys.executable, "-m", "mycli.cli", "serve", model, "--port", "0", "--json", "--ctx", str(context)]
    command += ["--max-sequences", str(together), *flags]
    environment = {name: value for name, value in os.environ.items() if name != options.KEY_VARIABLE}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                code = process.wait(_STOP_SECONDS)
                raise ModelError(
                    f"{model} could not be served (the server ended with {code})", "the reason is printed above"
                )
            yield str(json.loads(line)["url"])
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def bench_serving(
    call: Call, models: Sequence[str], loads: "Sequence[Load]", repetitions: int, flags: Sequence[str]
) -> Iterator[list[Row]]:
    """All loads on each server in turn; `flags`: of `mycli serve`, where a model is to be served."""
    for model in models:
        if re.match(r"https?://", model):
            yield _measure(call, model, "http", loads, repetitions, os.environ.get(options.KEY_VARIABLE))
            continue
        context = max(128, *(2 * (load.prompt + load.reply) for load in loads))  # a prompt has about so many tokens
        together = min(max(load.clients or load.requests for load in loads), 256)
        with _own_server(model, flags, context, together) as url:
            yield _measure(call, url, "own", loads, repetitions, None, model)


def _measure(
    call: Call,
    url: str,
    kind: str,
    loads: "Sequence[Load]",
    repetitions: int,
    key: str | None,
    name: str | None = None,
) -> list[Row]:
    from mycli.runtime.diagnostics.completion_client import CompletionServer
    from mycli.runtime.diagnostics.serving_load import run_load, tokens_per_word

    target = CompletionServer(url, key)
    name = name or f"{target.model} at {url}"
    salt = secrets.randbits(32)  # texts that the server has never seen: it may keep those of an earlier measurement
    per_word = tokens_per_word(target)  # and whatever the server makes at its first request is made
    rows = []
    with call.out.progress(name, repetitions * sum(load.requests for load in loads), "replies") as bar:
        for number, load in enumerate(loads):
            bar.describe(f"{name} {load.name}")
            runs = [
                run_load(target, load, per_word, salt + 1000 * number + run, lambda: bar.advance(1))
                for run in range(repetitions)
            ]
            rows.append(_row(target, name, kind, runs))
    return rows


def _row(target: "CompletionServer", name: str, kind: str, runs: "Sequence[LoadResult]") -> Row:
    from mycli.runtime.diagnostics.throughput import percentile

    answered = [reply for run in runs for reply in run.answered]
    failed = [reply.problem for run in runs for reply in run.replies if reply.problem]
    if not answered:
        raise ModelError(f"{name}: no request was answered: {failed[0]}", "try a smaller load, or shorter prompts")
    first = [reply.first_token_seconds for reply in answered]
    each = [seconds for reply in answered if (seconds := reply.token_seconds) is not None]
    queue = [run.queue_seconds for run in runs if run.queue_seconds is not None]
    counted = {key: sum(run.counted.get(key, 0.0) for run in runs) for run in runs for key in run.counted}
    rates = [run.rate for run in runs if run.answered]
    row: Row = {
        "model": name,
        "test": runs[0].load.name,
        "device": kind,
        "dtype": target.model,
        "kv": "",
        "tokens_per_second": statistics.fmean(rates),
        "sigma": statistics.stdev(rates) if len(rates) > 1 else 0.0,
        "samples": rates,
    }
    for field, values in (("ttft", first), ("tpot", each)):
        for share in (50, 95, 99):
            row[f"{field}_p{share}_seconds"] = percentile(values, share / 100) if values else None
    return row | {
        "queue_mean_seconds": statistics.fmean(queue) if queue else None,
        "preemptions": counted.get("num_preemptions"),
        "cached_tokens": sum(reply.cached for reply in answered),
        "prompt_tokens": sum(reply.prompt for reply in answered),
        "reply_tokens": sum(reply.tokens for reply in answered),
        "requests": sum(len(run.replies) for run in runs),
        "failed": len(failed),
        "first_problem": failed[0] if failed else None,
    }


def _times(row: Row, field: str) -> str:
    values = [row[f"{field}_p{share}_seconds"] for share in (50, 95, 99)]
    return "" if values[0] is None else "/".join(f"{1e3 * value:.0f}" for value in values) + " ms"


def serving_table(call: Call, rows: Sequence[Row]) -> None:
    """Show `rows` as a table."""
    call.out.table(_COLUMNS, [_cells(row) for row in rows], right=tuple(range(2, len(_COLUMNS))), order=_NARROW)


def _cells(row: Row) -> list[str]:
    queue, preempted = row["queue_mean_seconds"], row["preemptions"]
    return [
        row["model"],
        row["test"],
        f"{row['tokens_per_second']:.1f} ± {row['sigma']:.1f}",
        _times(row, "ttft"),
        _times(row, "tpot"),
        "" if queue is None else f"{1e3 * queue:.0f} ms",
        "" if preempted is None else f"{preempted:.0f}",
        f"{row['cached_tokens'] / row['prompt_tokens']:.0%}" if row["prompt_tokens"] else "",
        str(row["failed"] or ""),
    ]


def keeps(row: Row, promises: dict[str, float]) -> bool:
    """Whether nothing failed and what was asked holds for 95 % of the replies."""
    return not row["failed"] and all(row[name] is None or row[name] <= limit for name, limit in promises.items())


def judge(call: Call, rows: Sequence[Row], promises: dict[str, float], asked: str) -> None:
    """Say the largest load of each server that keeps the promises, if there are any.

    Raises GateError where a server keeps them under none.
    """
    if not promises:
        return
    servers: dict[str, list[Any]] = {}
    for row in rows:
        servers.setdefault(row["model"], []).extend([row] if keeps(row, promises) else [])
    for name, kept in servers.items():
        if kept:
            call.out.note(f"{name}: {kept[-1]['test']} is the largest load that keeps {asked} for {_PART:.0%}")
    without = [name for name, kept in servers.items() if not kept]
    if without:
        raise GateError(f"no load keeps {asked}: {', '.join(without)}", "try fewer clients, or shorter prompts")
