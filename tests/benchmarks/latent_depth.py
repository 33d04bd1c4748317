"""Compares absorbed and expanded latent attention for one token at a given cache depth, including the head projections.

    python -m tests.benchmarks.latent_depth [--depth 16k] [--seconds 3]

The expanded cache has a key of nope + rope and a value, padded to the key's size, for every head.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from mycli.cli.flags.options import parse_count
from mycli.runtime.cache.kv_cache import PACKED, Stored
from mycli.runtime.kernels.cpu import attention, latent
from mycli.runtime.kernels.paged import Ragged, Scoring

# heads, rank, nope, rope, value
SHAPES = {
    "DeepSeek-V2-Lite": (16, 512, 128, 64, 128),
    "DeepSeek-V3": (128, 512, 128, 64, 128),
    "GLM-4.7-Flash": (20, 512, 192, 64, 256),
}
KINDS = {"bf16": torch.bfloat16, "int8": torch.int8, "int4": PACKED}


def contest(name: str, kind: torch.dtype, depth: int, seconds: float) -> dict[str, float]:
    """Return the seconds of one token with each cache."""
    heads, rank, nope, rope, value = SHAPES[name]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    size = max(nope + rope, value)
    ragged = Ragged(torch.tensor([0, 1]).int(), torch.tensor([depth]).int(), torch.tensor([[0]]).int())
    latents, rotated = Stored.of(random(1, 1, depth, rank), kind), Stored.of(random(1, 1, depth, rope), kind)
    into, out = random(heads, rank, nope), random(heads, value, rank)
    query, turned, wide = random(1, heads, nope), random(1, heads, rope), random(1, heads, size)
    stored = torch.empty(1, heads, depth, size, dtype=torch.bfloat16).normal_(generator=generator)
    keys = Stored.of(stored, kind)
    values = Stored.of(stored.roll(1, 2), kind)
    del stored

    def absorbed() -> object:
        inner = latent.native_head_product(query, into)
        assert isinstance(inner, torch.Tensor)
        read = latent.native_latent_attention(inner, turned, latents, rotated, ragged, size**-0.5)
        assert isinstance(read, torch.Tensor)
        return latent.native_head_product(read, out)

    scoring = Scoring(size**-0.5)
    return _medians(
        {"latent": absorbed, "expanded": lambda: attention.attend_paged(wide, keys, values, ragged, scoring)}, seconds
    )


def _medians(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    # CPU time of one thread: on a shared machine wall time also counts other processes.
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in runs}
    while sum(map(sum, times.values())) < seconds or len(times["latent"]) < 4:
        for name, run in runs.items():
            began = time.process_time()
            run()
            times[name].append(time.process_time() - began)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def main() -> None:
    """Print milliseconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", default="16k")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each line")
    parser.add_argument("--kinds", default="bf16,int8,int4")
    asked = parser.parse_args()
    print("| model | cache | latent, ms | expanded, ms | ratio |\n|---|---|---:|---:|---:|")
    for name in SHAPES:
        for kind in asked.kinds.split(","):
            times = contest(name, KINDS[kind], parse_count(asked.depth), asked.seconds)
            ratio = times["expanded"] / times["latent"]
            spent = f"{times['latent'] * 1e3:.2f} | {times['expanded'] * 1e3:.2f}"
            print(f"| {name} | {kind} | {spent} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
