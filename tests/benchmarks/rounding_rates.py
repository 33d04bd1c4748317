"""What rounding a weight to 4 bits takes, in ns of one thread for each weight, with the instructions of MYCLI_CPU_ISA.

    PYTHONPATH=.links [MYCLI_CPU_ISA=avx2] python -m tests.benchmarks.rounding_rates [--repeats 7]

A random bf16 weight, with codes and what was lost: scales from the largest magnitude of a group, and scales searched
for as by `quantize`. The best of `--repeats` calls.
"""

import argparse
import time

import torch

from mycli.quant.rounding.grid import Grid, round_to_nearest
from mycli.runtime.kernels.cpu.library.build import native
from mycli.runtime.quantization.scheme import Packing

SHAPE = 1408, 2048


def main() -> None:
    """A line for each search and group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats: int = parser.parse_args().repeats
    library = native()
    if isinstance(library, str):
        raise SystemExit(library)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    weight = (torch.randn(*SHAPE) * 0.02).bfloat16()
    for search in ("absmax", "mse"):
        for group in (32, 128):
            grid, best = Grid(Packing(4, group), torch.bfloat16, search), float("inf")
            for _ in range(repeats):
                began = time.perf_counter()
                round_to_nearest(weight, grid, None)
                best = min(best, time.perf_counter() - began)
            print(
                f"{library.isa}, {search}, groups of {group}: {best * 1e9 / weight.numel():.1f} ns a weight", flush=True
            )


if __name__ == "__main__":
    main()
