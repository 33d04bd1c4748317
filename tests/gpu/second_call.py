"""The checks on a GPU after `first_call`: faults that no result shows, and a profile of the time.

PYTHONPATH=.links python -m tests.gpu.second_call [--minutes 9] [--out FOLDER]
PYTHONPATH=.links python -m tests.gpu.second_call --rehearse FOLDER    without a GPU, at sizes that measure nothing

Runs the four tools of compute-sanitizer on small products and a fused pass; profiles the O and the gate and up products
with ncu; times the fused pass without each of its launches and with other tiles; and times the products of a layer
with other numbers of K splits and narrower tiles, next to the predictions of `bench.latency`. If a tool is not
installed, this is reported and its workload runs without it.
"""

import csv
import io
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.gpu.call import SLOWER, Asked, Part, Rows, main

CHECKS = ("memcheck", "racecheck", "synccheck", "initcheck")
METRICS = {  # metric of ncu -> column name here
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of memory",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "% of issue",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "% of warps",
    "lts__t_sector_hit_rate.pct": "% of sectors hit in L2",
    "launch__registers_per_thread": "registers",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "warps that wait for memory",
}
FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/nsight-compute")


def tool(name: str) -> str | None:
    """Return the path of a CUDA toolkit command, None if it is not installed."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(FOLDERS))


def _run(asked: Asked, before: Sequence[str], part: str, more: Mapping[str, str]) -> tuple[int, str]:
    """Run a part of this module under a tool's command; return exit status and output."""
    rehearsed = ["--rehearse", str(asked.rehearse)] if asked.rehearse else []
    command = [*before, sys.executable, "-m", "tests.gpu.second_call", "--part", part, *rehearsed]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | more)
    return done.returncode, done.stdout


def watched(asked: Asked) -> Rows:
    """Run the sanitizers' workload: products for few rows and for more, and a fused pass launched once for each."""
    from mycli.runtime.engine.passes.fused import FusedStep
    from mycli.runtime.engine.passes.gate import difference
    from mycli.runtime.errors import Declined
    from mycli.runtime.kernels.triton.product.kernel import small_product
    from mycli.runtime.quantization.scheme import Packing
    from tests.gpu.first_call import layers

    chip = asked.chip()
    errors = [small_product(asked.device(), Packing(4, 128), chip, rows) for rows in (1, 12)]
    model = layers(asked, chip)
    step = FusedStep.compile(model)
    trouble = step if isinstance(step, Declined) else difference(model, step, counts=(1, 12))
    yield {"errors": errors, "trouble": str(trouble or ""), "ok": max(errors) < 5e-3 and trouble is None}


def summary(output: str) -> int | None:
    """Return the errors and hazards that compute-sanitizer counted; None without a summary: nothing was checked."""
    sums = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", output)
    return int(sums[-1]) if sums else None


def sanitized(asked: Asked) -> Rows:
    """Run each sanitizer until time is up; torch's caching allocator is off, so that out-of-bounds accesses show."""
    found = tool("compute-sanitizer")
    for check in CHECKS if found else CHECKS[:1]:
        before = [found, "--tool", check, "--kernel-name-exclude", "kns=at::native"] if found else []
        status, said = _run(asked, before, "watched", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
        count = summary(said) if found else 0
        row = {"check": check, "errors": count, "ok": status == 0 and count == 0}
        yield row if found else {**row, "check": "none: compute-sanitizer is not installed", "errors": None}
        if not row["ok"]:
            print(said[-4000:])


def large(asked: Asked) -> Rows:
    """Run the O and the gate and up products of the 8B model with their epilogues twice, the first time to compile."""
    import torch

    from mycli.runtime.kernels.triton.gated_silu import activate
    from mycli.runtime.kernels.triton.product.matmul import TritonMatmul
    from mycli.runtime.kernels.triton.residual import add
    from tests.gpu.bench.shapes import INT4
    from tests.gpu.bench.weights import packed

    chip, device = asked.chip(), asked.device()
    hidden, wide = (128, 256) if asked.rehearse else (4096, 28672)
    o, gate_up = (TritonMatmul(packed(n, hidden, INT4, device), chip) for n in (hidden, wide))
    following = TritonMatmul(packed(hidden, wide // 2, INT4, device), chip)
    counters = torch.zeros(1 << 14, dtype=torch.int32, device=device)
    for rows in (1,) if asked.rehearse else (1, 8, 16, 64):
        x = torch.randn(rows, hidden, device=device).bfloat16()
        ready, stream = o.prepare(x), torch.zeros_like(x)
        for _ in range(2):
            add(ready, o, stream, None, counters)
            made = activate(ready, gate_up, torch.bfloat16, following, counters)
        yield {"rows": rows, "ok": bool(stream.isfinite().all() and made.values.isfinite().all())}


def parse_ncu(output: str) -> list[dict[str, Any]]:
    """Parse the rows of `ncu --csv --page raw`: names, then units, then a line per launch; other lines are skipped."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    table = list(csv.DictReader(io.StringIO("\n".join(lines))))
    if not table:
        return []
    units, launches = table[0], table[1:]
    return [
        {"kernel": one["Kernel Name"].split("(")[0], "grid": one["Grid Size"]}
        | {title: f"{one[name]} {units[name]}".strip() for name, title in METRICS.items() if one.get(name)}
        for one in launches
    ]


def profiled(asked: Asked) -> Rows:
    """Yield the ncu metrics of each product's second launch."""
    found = tool("ncu")
    before = [found, "--csv", "--page", "raw", "--metrics", ",".join(METRICS), "-k", "multiply_kernel"] if found else []
    status, said = _run(asked, before, "large", {})
    if not found:
        yield {"kernel": "none: ncu is not installed", "ok": status == 0}
        return
    rows = parse_ncu(said)
    for place, row in enumerate(rows):
        if place // 2 % 2:  # O, gate and up; then both again
            yield row
    if status or not rows:  # ncu's output says if counters need administrator rights
        print(said[-4000:])
        yield {"kernel": "ncu counted nothing", "ok": False}


def profile(asked: Asked) -> Rows:
    """Yield the time of each kernel of the passes of a whole 8B: decoding for few sequences and many, and a prompt."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profiler

    from mycli.runtime.diagnostics.throughput import Trial, run_trial
    from tests.gpu.bench.shapes import INT4, LLAMA_8B, tiny
    from tests.gpu.bench.weights import model

    made, kernels = model(tiny(LLAMA_8B) if asked.rehearse else LLAMA_8B, INT4, asked.device())
    kind = ProfilerActivity.CPU if asked.rehearse else ProfilerActivity.CUDA
    trials = (
        [Trial(0, 4)] if asked.rehearse else [Trial(0, 33), Trial(0, 33, 0, 16), Trial(0, 33, 0, 64), Trial(512, 0)]
    )
    for trial in trials:
        run_trial(made, trial, 2)  # compiled and captured
        with torch_profiler(activities=(kind,)) as found:
            rate = run_trial(made, trial, 1).rates[-1]
        yield {"test": trial.name, "kernel": kernels, "tokens/s": rate, "ok": True}
        events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
        for event in events[:14]:
            time = event.self_cpu_time_total if asked.rehearse else event.self_device_time_total
            yield {"test": trial.name, "kernel": event.key[:60], "calls": event.count, "us": time / event.count}


def sweep(asked: Asked) -> Rows:
    """Time each product of a layer with a residual add, for other splits and other tiles, in microseconds.

    Tiles are also half as wide, and of many rows for a half and a quarter of them. The first row of each product is the
    choice of the tile table. All variants of a product are timed interleaved.
    """
    import torch

    from mycli.runtime.kernels.triton.product import tiles as triton_tiles
    from mycli.runtime.kernels.triton.product.matmul import TritonMatmul
    from mycli.runtime.kernels.triton.residual import add
    from tests.gpu.bench.latency import cards, product_microseconds
    from tests.gpu.bench.shapes import INT4
    from tests.gpu.bench.timing import Context, copies, in_turns, replay
    from tests.gpu.bench.weights import packed

    chip, device = asked.chip(), asked.device()
    context = Context(device, tiny=asked.rehearse is not None, rounds=1 if asked.rehearse else 5)
    shapes = {"o": (4096, 4096), "qkv": (6144, 4096), "down": (4096, 14336), "gate_up": (28672, 4096)}
    card, counters = cards()["H200"], torch.zeros(1 << 14, dtype=torch.int32, device=device)
    for name, (n, k) in {"o": (128, 512)}.items() if asked.rehearse else shapes.items():
        weights = [TritonMatmul(packed(n, k, INT4, device), chip) for _ in range(copies(INT4.bytes(n, k), context))]
        for rows in (1,) if asked.rehearse else (1, 8, 16, 64):
            dense = torch.randn(rows, k, device=device).bfloat16()
            x = weights[0].prepare(dense)
            streams = torch.zeros(rows, n, device=device).bfloat16()
            own = triton_tiles.split(chip, x.tile, INT4.bits, rows, n, k, x.tile_k)
            tilings = {(x.tile, own)}
            timed: dict[tuple[Any, tuple[int, int]], Callable[[], float]] = {}
            narrow = replace(x.tile, block_n=x.tile.block_n // 2, warps=x.tile.warps // 2)
            fewer = [triton_tiles.tile(chip, INT4, rows // part) for part in (2, 4) if rows // part >= 16]
            for tile in (x.tile, narrow, *fewer):
                for count in (1, 2, 4, 8, 16, 32):
                    tilings.add((tile, triton_tiles.even_parts(tile, count, k, x.tile_k)))
            for tile, parts in sorted(tilings, key=lambda one: (one != (x.tile, own), one[0].block_n, one[1])):
                given = weights[0].prepare(dense, tile) if tile in fewer else replace(x, tile=tile)
                calls = [partial(add, given, weight, streams, None, counters) for weight in weights]
                with patch.object(triton_tiles, "parts", lambda *_, parts=parts: parts):
                    timed[tile, parts] = replay(calls, context)
            for (tile, parts), samples in in_turns(timed, context.rounds).items():
                predicted = product_microseconds(card, INT4, rows, n, k, tile, parts[0])
                yield {
                    "product": name, "rows": rows, "tile": tile.block_m, "block": tile.block_n, "warps": tile.warps,
                    "parts": parts[0],
                    "us": statistics.median(samples) * 1e6, "predicted us, H200": predicted,
                    "chosen": (tile, parts) == (x.tile, own),
                }  # fmt: skip


def _of_a_pass(asked: Asked, part: Callable[..., Rows]) -> Rows:
    from tests.gpu.bench.timing import Context
    from tests.gpu.first_call import layers

    context = Context(asked.device(), tiny=asked.rehearse is not None, rounds=1 if asked.rehearse else 5)
    model = layers(asked, asked.chip(), 8)
    yield from part(model, context, (1,)) if asked.rehearse else part(model, context)


def pieces(asked: Asked) -> Rows:
    """Time a layer of the fused pass without each of its launches."""
    from tests.gpu.bench import pass_pieces

    yield from _of_a_pass(asked, pass_pieces.pieces)


def tiles(asked: Asked) -> Rows:
    """Time a layer of the fused pass with other tiles."""
    from tests.gpu.bench import pass_pieces

    yield from _of_a_pass(asked, pass_pieces.tiles)


def parts(asked: Asked, out: Path) -> Sequence[Part]:
    slower = SLOWER if asked.rehearse is not None else 1
    return [
        Part("compute-sanitizer", slower * 240, sanitized, "compute-sanitizer, and all of its checks but one"),
        Part("ncu", slower * 90, profiled, "ncu: O and gate_up of small sizes run without it"),
        Part("pieces of a pass", slower * 60, pieces, "time, and launches that overlap"),
        Part("tiles in a pass", slower * 120, tiles, "time, and launches that overlap"),
        Part("profile", slower * 60, profile, "kernels of a GPU: it profiles a small model on the CPU"),
        Part("sweep of splits", slower * 180, sweep, "time: the emulator's says nothing"),
    ]


TARGETS = {"watched": watched, "large": large}  # workloads of the tools

if __name__ == "__main__":
    sys.exit(main(str(__doc__), "tests.gpu.second_call", parts, 9, TARGETS))
