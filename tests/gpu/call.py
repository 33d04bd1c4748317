"""Run the parts of a GPU session one after the other, each in a process with a time limit, and write each result.

A part that hangs or crashes does not affect the others. A part is a function that yields rows, or a command;
`first_call` and `second_call` define the parts. A rehearsal runs kernels on the emulator (`tests.ptx.emulator`), which
caches what it compiles in its folder; what the emulator cannot show is noted with each part.
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.gpu.bench.report import Report

Rows = Iterator[dict[str, Any]]
_ROW = "row: "  # prefix of a child's output line that is a row of its part
SLOWER = 10  # time factor of a rehearsal: the emulator compiles each kernel again and is slow


@dataclass(frozen=True)
class Asked:
    """The device of the parts: CUDA, or with `rehearse` the emulator."""

    rehearse: Path | None = None

    def chip(self) -> Any:
        """Return the chip of the device; sets up the emulator."""
        import torch

        from mycli.runtime.kernels.triton.product.matmul import chip_of
        from mycli.runtime.kernels.triton.product.tiles import Chip

        if self.rehearse is None:
            return chip_of(torch.device("cuda", 0))
        from tests.ptx.emulator.device import Device

        torch.set_num_threads(1)
        os.environ["TRITON_CACHE_DIR"] = str(self.rehearse / "triton")
        Device.set_up(self.rehearse, 90)
        return Chip((9, 0), 132, pdl=True)

    def device(self) -> Any:
        import torch

        return torch.device("cpu" if self.rehearse else "cuda")

    def capture(self) -> Any:
        """Return a CUDA graph or its emulation."""
        from mycli.runtime.engine.passes.graphs import GraphCapture

        return (lambda work: work) if self.rehearse else GraphCapture()


@dataclass(frozen=True)
class Part:
    """The part to run.

    run: a function that yields rows, or a command. lacks: what its rehearsal does not show. timed: it measures time, so
    that nothing may run beside it; others run beside their neighbours.
    """

    name: str
    seconds: int
    run: Callable[[Asked], Rows] | Sequence[str]
    lacks: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    timed: bool = True


def bounded(command: Sequence[str], seconds: float, more: Mapping[str, str]) -> tuple[int | None, str]:
    """Run a command; return its exit status (None: killed with its children after `seconds`) and its output."""
    child = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **more},  # what it printed before it is killed is not lost
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=seconds)
        return child.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return None, child.communicate()[0]


def ask(report: Report, parts: Iterable[tuple[Part, Sequence[str]]], seconds: float) -> bool:
    """Run the parts by these commands; return whether all succeeded. Parts that do not fit are dropped from the end."""
    end, good = time.monotonic() + seconds, True
    for timed, given in groupby(parts, lambda one: one[0].timed):
        for group in ([one] for one in given) if timed else [list(given)]:
            good = _beside(report, group, end) and good
    return good


def _beside(report: Report, group: Sequence[tuple[Part, Sequence[str]]], end: float) -> bool:
    """Run parts at the same time and write each result as it comes; return whether all succeeded."""
    left, good = end - time.monotonic(), True
    if left < 5:
        for part, _ in group:
            report.note(part.name, "", "dropped", "no time is left")
        report.write()
        return True
    began = time.monotonic()
    with ThreadPoolExecutor(len(group)) as pool:
        running = {
            pool.submit(bounded, command, min(part.seconds, left), part.environment): part for part, command in group
        }
        for done in as_completed(running):
            good = _write(report, running[done], *done.result(), time.monotonic() - began) and good
    return good


def _write(report: Report, part: Part, status: int | None, said: str, took: float) -> bool:
    """Write the result of a part, and its output beside the report; return whether it succeeded."""
    lines = said.splitlines()
    rows = [json.loads(line.removeprefix(_ROW)) for line in lines if line.startswith(_ROW)]
    last = lines[-1][:200] if lines else ""
    report.rows[part.name] = rows or [{"exit": status, "seconds": took, "last line": last}]
    wrong = [row for row in rows if not row.get("ok", True)]
    good = status == 0 and not wrong
    if not good:
        text = "ended after its time" if status is None else "\n".join(lines[-30:])
        report.note(part.name, "", "error", text if status != 0 else f"{len(wrong)} rows are wrong")
    report.write()
    with report.target.with_suffix(".log").open("a") as log:
        log.write(f"== {part.name}\n{said}\n")
    print(f"{part.name}: {'well' if good else 'see the report'}, {took:.0f} s", flush=True)
    return good


def main(
    about: str,
    module: str,
    parts: Callable[[Asked, Path], Sequence[Part]],
    minutes: float,
    targets: Mapping[str, Callable[[Asked], Rows]] = MappingProxyType({}),
) -> int:
    """Run the command of a session and return its exit status.

    about: what it does; module: how it is started; minutes: time limit; targets: further names for `--part`.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help=f"it may take; {minutes:g}, a rehearsal {SLOWER} times that")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "docs/results"))
    parser.add_argument("--rehearse", type=Path, help="no GPU: run the kernels on the emulator")
    parser.add_argument("--only", action="append", default=[], help="this part; may be given several times")
    parser.add_argument("--part", help="run one part in this process and print its rows")
    given = parser.parse_args()
    asked = Asked(given.rehearse)
    known = {part.name: part for part in parts(asked, given.out)}
    work = {name: part.run for name, part in known.items() if callable(part.run)} | dict(targets)
    for name, choices in (*((name, known) for name in given.only), *([(given.part, work)] if given.part else [])):
        if name not in choices:
            parser.error(f"there is no part {name!r}: {', '.join(choices)}")
    if given.part:
        for row in work[given.part](asked):
            print(_ROW + json.dumps(row), flush=True)
        return 0
    rehearsed = ["--rehearse", str(given.rehearse)] if given.rehearse else []
    name = module.rpartition(".")[2].replace("_", "-")
    facts = {"device": f"{name}, rehearsed" if given.rehearse else name, "date": datetime.date.today().isoformat()}
    report = Report(facts, given.out / (f"{name}-rehearsal" if given.rehearse else name))
    wanted = [part for part in known.values() if not given.only or part.name in given.only]
    for part in wanted:
        if given.rehearse and part.lacks:
            report.note(part.name, "", "not rehearsed", part.lacks)
    python = [sys.executable, "-m", module, "--part"]
    commands = [(one, [*python, one.name, *rehearsed] if callable(one.run) else one.run) for one in wanted]
    good = ask(report, commands, 60 * (given.minutes or minutes * (SLOWER if given.rehearse else 1)))
    print(f"written: {report.target}.json and .md")
    return 0 if good else 1
