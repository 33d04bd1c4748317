"""Measures the time of rounding a weight to 4 bits on one thread, with the instructions of MYCLI_CPU_ISA.

    PYTHONPATH=.links [MYCLI_CPU_ISA=avx2] python -m tests.benchmarks.rounding_rates [--repeats 7]

Uses a random bf16 weight and computes codes and rounding errors: with scales from the largest magnitude of a group, and
with searched scales as in `quantize`, in ns per weight. The column loops of GPTQ and coordinate descent are measured in
10^9 multiplications per second. Prints the best of `--repeats` calls.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from mycli.quant.rounding.columns import solve_block
from mycli.quant.rounding.grid import BLOCK, Grid, round_to_nearest
from mycli.runtime.kernels.cpu.library.build import native
from mycli.runtime.quantization.scheme import Packing

SHAPE = 1408, 2048
ROWS = 4096  # rows of a block of columns


def best_of(repeats: int, call: Callable[[], object]) -> float:
    """Return the seconds of the shortest call."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    """Print a line for each search and group size, and for each loop."""
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
            grid = Grid(Packing(4, group), torch.bfloat16, search)
            best = best_of(repeats, partial(round_to_nearest, weight, grid, None))
            print(
                f"{library.isa}, {search}, groups of {group}: {best * 1e9 / weight.numel():.1f} ns a weight", flush=True
            )
    residual, scales = torch.randn(BLOCK, ROWS), torch.full((BLOCK, ROWS), 0.1)
    matrix, codes = torch.randn(BLOCK, BLOCK) * 0.01 + torch.eye(BLOCK), torch.full((BLOCK, ROWS), 8, dtype=torch.uint8)
    for name, before in (("GPTQ", None), ("coordinate descent", codes)):
        best = best_of(repeats, partial(solve_block, residual, matrix, scales, before, 8))
        rate = ROWS * BLOCK * (BLOCK - 1) / 2e9 / best
        print(f"{library.isa}, columns of {name}: {rate:.1f} 10^9 a second", flush=True)


if __name__ == "__main__":
    main()
