"""Run the GPU benchmark in one command: limits, products, whole models, the program; one JSON and one table.

PYTHONPATH=.links python -m tests.gpu.bench [--device cuda] [--minutes 9] [--tiny] [--only PART] [--out FOLDER]

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

from mycli.runtime.device.nvml import gpus
from mycli.runtime.device.system import cpu
from mycli.runtime.errors import ResourceError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.quantization.scheme import Packing
from tests.gpu.bench import end_to_end, kernels, limits, whole_program
from tests.gpu.bench.report import Budget, Part, Report, run
from tests.gpu.bench.shapes import INT4, LLAMA_8B, QWEN3_4B
from tests.gpu.bench.timing import Context


def facts(device: torch.device) -> dict[str, object]:
    """Return device, driver and versions."""
    found: dict[str, object] = {"device": cpu().model or "cpu"}
    if device.type == "cuda":
        found = {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
        try:
            found["driver"] = ", ".join(sorted({gpu.driver for gpu in gpus()})) or "unknown"
        except ResourceError:  # NVML fails although CUDA works
            found["driver"] = "unknown"
    found |= {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "python": sys.version.split()[0]}
    return {**found, "command": shlex.join(["python", "-m", "tests.gpu.bench", *sys.argv[1:]])}


def parts(context: Context) -> list[Part]:
    """Return the parts by decreasing importance: the last ones are dropped first."""

    def products(packing: Packing) -> Part:
        return Part(f"products, {packing.name}", 5, lambda: kernels.table(context, packing))

    def tokens(name: str, config: ModelConfig, packing: Packing | None) -> Part:
        title = f"{name}, {packing.name if packing else 'bf16'}"
        return Part(title, 20, lambda: end_to_end.cases(context, name, config, packing))

    return [
        Part("limits", 5, lambda: limits.cases(context)),
        Part("error against fp64", 5, lambda: kernels.proof(context)),
        products(INT4),
        tokens("Llama-3.1-8B", LLAMA_8B, INT4),
        tokens("Qwen3-4B", QWEN3_4B, INT4),
        Part("quantization, Llama-3.1-8B", 60, lambda: whole_program.quantization(context)),
        Part("cold start", 20, lambda: whole_program.cold_start(context)),
        tokens("Llama-3.1-8B", LLAMA_8B, None),
        Part("transformers, Llama-3.1-8B", 40, lambda: whole_program.transformers(context, LLAMA_8B)),
        tokens("Qwen3-4B", QWEN3_4B, None),
        *(products(Packing(bits, 128)) for bits in (8, 3, 2)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--tiny", action="store_true", help="sizes that prove the harness and measure nothing")
    parser.add_argument("--only", action="append", help="a part by its title, several if repeated; limits always run")
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

    chosen = [part for part in parts(context) if not given.only or part.name in ("limits", *given.only)]
    run(report, chosen, budget, lambda text: print(text, flush=True), between)
    print(f"written: {report.target}.json and .md")


if __name__ == "__main__":
    main()
