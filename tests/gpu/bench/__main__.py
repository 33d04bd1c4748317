"""The protocol on one device, as one command: limits, products, whole models; one JSON and one table.

    PYTHONPATH=.links python -m tests.gpu.bench [--device cuda] [--minutes 9] [--tiny] [--out FOLDER]

The files go to --out, else $OUT, else docs/results, and are written after every case.
"""

import argparse
import datetime
import gc
import os
import shlex
import sys
from pathlib import Path

import torch

from mycli.runtime.machine import cpu
from mycli.runtime.nvml import gpus
from mycli.runtime.packing import Packing
from tests.gpu.bench import end_to_end, kernels, limits
from tests.gpu.bench.report import Budget, Part, Report, run
from tests.gpu.bench.shapes import INT4, LLAMA_8B, QWEN3_4B
from tests.gpu.bench.timing import Context


def facts(device: torch.device) -> dict[str, object]:
    """Device, driver, versions."""
    found: dict[str, object] = {"device": cpu().model or "cpu"}
    if device.type == "cuda":
        found = {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
        found["driver"] = ", ".join(sorted({gpu.driver for gpu in gpus()}))
        found["clock at start MHz"] = _clock(device)
    found |= {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "python": sys.version.split()[0]}
    return {**found, "command": shlex.join(["python", "-m", "tests.gpu.bench", *sys.argv[1:]])}


def _clock(device: torch.device) -> object:
    try:
        return torch.cuda.clock_rate(device)
    except Exception as error:  # needs NVML's Python package, which may be missing
        return f"not known ({type(error).__name__})"


def parts(context: Context) -> list[Part]:
    """In order of importance: what comes last is dropped first."""
    made = [
        Part("limits", 5, lambda: limits.cases(context)),
        Part("error against fp64", 5, lambda: kernels.proof(context)),
        Part("products, int4", 5, lambda: kernels.table(context, INT4)),
    ]
    for name, config, packing in (
        ("Llama-3.1-8B", LLAMA_8B, INT4),
        ("Qwen3-4B", QWEN3_4B, INT4),
        ("Llama-3.1-8B", LLAMA_8B, None),
        ("Qwen3-4B", QWEN3_4B, None),
    ):
        title = f"{name}, {packing.name if packing else 'bf16'}"
        made.append(Part(title, 20, lambda n=name, c=config, p=packing: end_to_end.cases(context, n, c, p)))  # type: ignore[misc]
    for bits in (8, 3, 2):
        made.append(Part(f"products, int{bits}", 5, lambda b=bits: kernels.table(context, Packing(b, 128))))  # type: ignore[misc]
    return made


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--tiny", action="store_true", help="sizes that prove the harness and measure nothing")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "docs/results"))
    given = parser.parse_args()
    budget = Budget(given.minutes * 60)
    device = torch.device(given.device)
    context = Context(device, given.tiny, 1 if given.tiny else 5)
    known = facts(device)
    name = "-".join(str(known["device"]).lower().split()) + f"-{known['date']}"
    report = Report(known, given.out / "".join(c for c in name if c.isalnum() or c in "-."))

    def between() -> None:
        gc.collect()
        if context.cuda:
            torch.cuda.empty_cache()

    run(report, parts(context), budget, lambda text: print(text, flush=True), between)
    print(f"written: {report.target}.json and .md")


if __name__ == "__main__":
    main()
