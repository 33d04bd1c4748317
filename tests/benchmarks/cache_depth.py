"""Measures the decode rate of one sequence at several cache depths and cache dtypes, alternating within one process.

    python -m tests.benchmarks.cache_depth MODEL [--depths 512,4k] [--seconds 10]

The model is loaded once and the caches are filled with random vectors; prints tokens per second from medians over
single tokens.
"""

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from mycli.cli.flags.options import parse_count
from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import compile_passes
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.models.config import KvDtype

KINDS: tuple[KvDtype, ...] = ("bf16", "int8", "int4")
FILLED = 256  # tokens written per call


def filled(runner: ModelRunner, depth: int) -> KVCache:
    """Return a cache of one sequence that holds `depth` random keys and values in every layer."""
    cache = runner.make_cache(CacheShape.contiguous(depth + 1))
    for layer in range(runner.config.layers):
        for start in range(0, depth, FILLED):
            count = min(FILLED, depth - start)
            batch = Batch.of([Chunk([0] * count, start, (0,), 0)], cache.block_size, runner.device)
            shapes = [part.data.shape for part in cache.all(layer)]
            cache.write(layer, batch, *(torch.randn(count, shape[1], shape[3]).bfloat16() for shape in shapes))
    return cache


def main() -> None:
    """Print a line for each depth and kind of cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--depths", default="512,4k")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each depth")
    chosen = parser.parse_args()
    model = load_model(open_model_folder(chosen.model), Placement(torch.device("cpu"), torch.bfloat16)).model
    runners = {kv: ModelRunner(model, kv, compile_passes(model, kv)) for kv in KINDS}
    plan = MemoryPlan(model.config, dtype="bfloat16")
    for depth in map(parse_count, chosen.depths.split(",")):
        caches = {kv: filled(runner, depth) for kv, runner in runners.items()}
        times: dict[KvDtype, list[float]] = {kv: [] for kv in KINDS}
        began = time.perf_counter()
        while time.perf_counter() - began < chosen.seconds:
            for kv, seconds in times.items():
                start = time.perf_counter()
                runners[kv].run([Chunk([1], depth, (0,), 1)], caches[kv])
                seconds.append(time.perf_counter() - start)
        medians = {kv: statistics.median(seconds[1:]) for kv, seconds in times.items()}
        for kv, median in medians.items():
            size = sum(replace(plan, kv=kv).token_bytes(layer) for layer in range(model.config.layers))
            gained = medians["bf16"] / median
            rate = f"{1 / median:7.2f} tokens/s, {gained:.2f} x"
            print(f"{depth:6} {kv}: {rate}, {size / 1024:.2f} KiB a token", flush=True)


if __name__ == "__main__":
    main()
